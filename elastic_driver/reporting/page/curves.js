// --- curves over time --------------------------------------------------------------------------------------------
const percent = x => (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + " %";
function number(x) {
  const size = Math.abs(x);
  if (x === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return Number(x.toPrecision(3)).toExponential().replace("e+", "e");
  return String(+x.toPrecision(4));
}
// Title, key of the help, unit, formatter of values, end of the axis if it is fixed, whether the values are bytes.
const SERIES = {
  steps_per_s: ["Steps/s", "training steps", "", number],
  waiting: ["Waiting", "waiting", "of the workers' time", percent, 1],
  cpu: ["CPU", "processor", "cores busy", number],
  memory_mb: ["Memory", "memory", "of all workers", bytes, null, true],
  gpu: ["GPU", "gpu", "busy", percent, 1],
  gpu_memory_mb: ["GPU memory", "gpu memory", "of all GPUs", bytes, null, true],
};
const FEW_FIGURES = 12, MOST_POINTS = 6000, TALL = 118, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 18;
let curves = { t: [], series: new Map() }, cross = null, areAllShown = false;
const panels = new Map(), inView = new Set();
const plain = v => typeof v === "number" && isFinite(v) && Math.abs(v) < 1e300 ? v : null;

// Figures that the training reports have names of its own choice: a prefix keeps them apart from ours.
function seriesOf(data) {
  const found = new Map(), known = data.series || {};
  for (const name of Object.keys(SERIES)) if (Array.isArray(known[name])) found.set(name, known[name]);
  for (const [name, values] of Object.entries(known.figures || {})) if (Array.isArray(values)) found.set("figure " + name, values);
  return found;
}
function applyCurves(frame) {
  const whole = frame.whole && !frame.curves ? { t: [] } : frame.curves, more = frame.curves_new;
  if (whole) { curves = { t: [], series: new Map() }; addPoints(whole); }
  if (more) addPoints(more);
  if (whole || more) dirty.add("curves");
}
function addPoints(data) {
  const t = (data.t || []).map(plain), had = curves.t.length, added = seriesOf(data);
  curves.t.push(...t);
  for (const name of added.keys()) if (!curves.series.has(name)) curves.series.set(name, new Array(had).fill(null));
  for (const [name, values] of curves.series) {
    const fresh = added.get(name) || [];
    for (let i = 0; i < t.length; i++) values.push(plain(fresh[i]));
  }
  if (curves.t.length > MOST_POINTS) {
    // For a page that is open for weeks: drop every other point of the older half.
    const half = curves.t.length >> 1, isKept = (_, i) => i >= half || i % 2 === 0;
    curves.t = curves.t.filter(isKept);
    for (const [name, values] of curves.series) curves.series.set(name, values.filter(isKept));
  }
}
function lastOf(name) {
  const values = curves.series.get(name) || [];
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}
function indexOf(time) {
  // Returns the index of the nearest point.
  const { t } = curves;
  let low = 0, high = t.length - 1;
  while (low < high) { const middle = (low + high) >> 1; t[middle] < time ? low = middle + 1 : high = middle; }
  return low > 0 && time - t[low - 1] < t[low] - time ? low - 1 : low;
}
function ticks(low, high, most) {
  const raw = (high - low) / most, size = 10 ** Math.floor(Math.log10(raw));
  const every = [1, 2, 5, 10].map(n => n * size).find(n => n >= raw) || raw, found = [];
  for (let i = Math.ceil(low / every - 1e-9); i * every <= high + every * 1e-9 && found.length < 12; i++) found.push(+(i * every).toPrecision(12));
  return found;
}

// The times that are shown, and the index of the point under the cross.
const view = { t0: 0, t1: 1, first: 0, last: -1 };
function renderCurves(t0, t1) {
  const own = [...curves.series.keys()].filter(name => name.startsWith("figure ")), { t } = curves;
  // In a fixed order, whichever had the first value.
  const known = Object.keys(SERIES).filter(name => curves.series.has(name));
  const shown = known.concat(areAllShown ? own : own.slice(0, FEW_FIGURES));
  $("curves-card").hidden = !shown.length;
  if (!shown.length) return;
  Object.assign(view, { t0, t1, first: t.findIndex(at => at >= t0), last: t.findLastIndex(at => at <= t1) });
  if (view.first < 0) view.first = t.length;
  const keep = new Set(shown);
  for (const [name, panel] of panels) if (!keep.has(name)) { watcher.unobserve(panel.box); inView.delete(panel); panel.box.remove(); panels.delete(name); }
  shown.forEach((name, i) => {
    const panel = panels.get(name) || newPanel(name), box = $("curves");
    if (box.children[i] !== panel.box) box.insertBefore(panel.box, box.children[i] || null);
  });
  $("curves-more").hidden = own.length <= FEW_FIGURES;
  put($("curves-all"), areAllShown ? "Show fewer" : "Show all " + own.length + " reported figures");
  // Read before anything is drawn: else the browser lays out the page once for each panel.
  for (const panel of inView) panel.width = panel.chart.clientWidth || 300;
  for (const panel of inView) drawPanel(panel);
  renderCross();
}
const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const panel = panels.get(entry.target.dataset.name);
    if (!panel) continue;
    if (entry.isIntersecting) { inView.add(panel); panel.width = panel.chart.clientWidth || 300; drawPanel(panel); drawCross(panel); } else inView.delete(panel);
  }
}, { rootMargin: "200px" });
function newPanel(name) {
  const known = SERIES[name], title = known ? known[0] : name.slice(7);
  const chart = draw("svg", { class: "curve", role: "img", height: TALL, "aria-label": clean(title) });
  const value = make("span", { class: "value" }), unit = make("span", { class: "dim unit" }, known ? known[2] : "");
  const box = make("div", { class: "panel", "data-name": name },
    make("h3", {}, word(known ? known[1] : "reported", title), unit, value), chart);
  const panel = { name, title, box, chart, value, show: known ? known[3] : number, end: known && known[4], own: !known, isBytes: !!(known && known[5]), hair: draw("g", { class: "hair" }) };
  const point = event => {
    const rect = chart.getBoundingClientRect(), share = (event.clientX - rect.left - LEFT) / Math.max(1, rect.width - LEFT - RIGHT);
    setCross(view.t0 + Math.min(1, Math.max(0, share)) * (view.t1 - view.t0));
  };
  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointerleave", event => { if (event.pointerType === "mouse" && document.activeElement !== $("cross")) setCross(null); });
  panels.set(name, panel);
  watcher.observe(box);
  return panel;
}
const across = (panel, time) => LEFT + (panel.width - LEFT - RIGHT) * (time - view.t0) / (view.t1 - view.t0);
const upward = (panel, value) => TOP + (TALL - TOP - BOTTOM) * (1 - (value - panel.low) / (panel.high - panel.low));
function drawPanel(panel) {
  const { chart, name } = panel, { t } = curves, values = curves.series.get(name), { t0, t1, first, last } = view;
  if (!values) return;
  const { width } = panel, nodes = [], inner = [];
  let low = Infinity, high = -Infinity;
  for (let i = first; i <= last; i++) { const v = values[i]; if (v !== null) { if (v < low) low = v; if (v > high) high = v; } }
  const least = low, most = high, any = low <= high;
  if (!any) [low, high] = [0, 1];
  if (panel.end) [low, high] = [0, panel.end];
  else if (!panel.own) low = Math.min(0, low);
  else low -= (high - low) / 20;
  if (!panel.end) high += (high - low) / 20;
  if (high - low < Math.max(Math.abs(high), Math.abs(low)) * 1e-9 || high === low) { const room = Math.abs(high) / 10 || 1; high += room; if (panel.own) low -= room; }
  Object.assign(panel, { low, high });
  const x = time => across(panel, time), y = value => upward(panel, value);
  const label = (at, line, words, more) => { const node = draw("text", { x: at, y: line, ...more }); node.textContent = words; return node; };
  const unit = panel.isBytes && high >= 1024 ? 1024 ** Math.min(3, Math.floor(Math.log2(high) / 10)) : 1;
  for (const value of ticks(low / unit, high / unit, 3).map(tick => tick * unit)) {
    nodes.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      label(LEFT - 5, Math.max(10, y(value) + 4), panel.show(value), { "text-anchor": "end" }));
  }
  const every = step(t1 - t0, Math.max(2, (width - LEFT) / 90)), zone = new Date().getTimezoneOffset() * 60;
  for (let at = Math.ceil((t0 - zone) / every) * every + zone, n = 0; at <= t1 && n < 400; at += every, n++)
    if (x(at) < width - 24) nodes.push(label(Math.max(LEFT + 16, x(at)), TALL - 4, shortClock(at, every), { "text-anchor": "middle" }));
  // Behind the curve, as in the timeline: the times without training, and the starts of rounds.
  for (const [from, to, kind] of downtimes) if (to >= t0 && from <= t1)
    inner.push(draw("rect", { class: "band " + kind, x: x(Math.max(from, t0)) - LEFT, y: 0, width: Math.max(1, x(Math.min(to, t1)) - x(Math.max(from, t0))), height: TALL - TOP - BOTTOM }));
  let before = -9;
  for (const at of changes) if (at >= t0 && at <= t1 && x(at) - before > 3) {
    before = x(at);
    inner.push(draw("line", { class: "change", x1: before - LEFT, x2: before - LEFT, y1: 0, y2: TALL - TOP - BOTTOM }));
  }
  inner.push(draw("path", { class: "line", d: lineOf(values, Math.max(0, first - 1), Math.min(t.length - 1, last + 1), i => x(t[i]) - LEFT, v => y(v) - TOP) }));
  const plot = draw("svg", { x: LEFT, y: TOP, width: Math.max(1, width - LEFT - RIGHT), height: TALL - TOP - BOTTOM, class: "plot" });
  plot.append(...inner);
  chart.setAttribute("viewBox", `0 0 ${width} ${TALL}`);
  chart.setAttribute("aria-label", clean(panel.title) + " from " + clock(t0) + " to " + clock(t1) + ": "
    + (any ? "between " + panel.show(least) + " and " + panel.show(most) : "no data"));
  chart.replaceChildren(...nodes, plot, panel.hair);
}
function lineOf(values, first, last, x, y) {
  // Of the points that share a pixel column, keep the first, the last, the lowest and the highest.
  const parts = [];
  let pen = false, column = null, from = 0, low = 0, high = 0, end = 0, alone = false;
  const put = i => { const at = x(i).toFixed(1) + " " + y(values[i]).toFixed(1); parts.push((pen ? "L" : "M") + at); alone = !pen; pen = true; };
  const flush = () => {
    if (column === null) return;
    for (const i of [...new Set([from, Math.min(low, high), Math.max(low, high), end])]) put(i);
    column = null;
  };
  const lift = () => { flush(); if (alone) parts.push("h.01"); pen = alone = false; };
  for (let i = first; i <= last; i++) {
    if (values[i] === null) { lift(); continue; }
    const here = Math.floor(x(i));
    if (column !== here) { flush(); column = here; from = low = high = i; }
    if (values[i] < values[low]) low = i;
    if (values[i] > values[high]) high = i;
    end = i;
  }
  lift();
  return parts.join("");
}

// --- the cross ---------------------------------------------------------------------------------------------------
function setCross(time) { cross = time; requestAnimationFrame(renderCross); }
function renderCross() {
  const { first, last } = view, slider = $("cross"), { t } = curves;
  const at = cross === null || first > last ? null : Math.min(last, Math.max(first, indexOf(cross)));
  view.at = at;
  slider.max = Math.max(0, last - first);
  slider.value = at === null ? slider.max : at - first;
  slider.disabled = first >= last;
  const named = at === null ? "now" : clock(t[at]), spoken = [];
  for (const panel of panels.values()) put(panel.value, valueOf(panel));
  for (const panel of inView) drawCross(panel);
  for (const panel of panels.values()) if (spoken.length < 8) spoken.push(clean(panel.title) + " " + valueOf(panel));
  slider.setAttribute("aria-valuetext", named + ": " + spoken.join("; ") + (panels.size > spoken.length ? "; and " + (panels.size - spoken.length) + " more" : ""));
  put($("cross-time"), at === null ? (job.ended || recorded ? "last values" : "now") : "at " + named);
  drawHairOfTimeline();
}
function valueOf(panel) {
  const values = curves.series.get(panel.name) || [], value = view.at === null ? values[view.last] ?? null : values[view.at] ?? null;
  const last = value === null && view.at === null && (job.ended || recorded) ? lastOf(panel.name) : value;
  return last === null ? "no data" : panel.show(last);
}
function drawCross(panel) {
  const at = view.at, values = curves.series.get(panel.name);
  if (at === null || at === undefined || !values) { panel.hair.replaceChildren(); return; }
  const place = across(panel, curves.t[at]), parts = [draw("line", { x1: place, x2: place, y1: TOP, y2: TALL - BOTTOM })];
  if (values[at] !== null && values[at] !== undefined) parts.push(draw("circle", { cx: place, cy: upward(panel, values[at]), r: 3.5 }));
  panel.hair.replaceChildren(...parts);
}
$("cross").oninput = () => {
  const { first, last } = view, chosen = first + +$("cross").value;
  setCross(chosen >= last ? null : curves.t[chosen]);
};
$("cross").onkeydown = event => { if (event.key === "Escape") setCross(null); };
$("curves-all").onclick = () => { areAllShown = !areAllShown; renderChart(); };
