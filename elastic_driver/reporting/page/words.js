// --- help on each word -------------------------------------------------------------------------------------------
// The meaning of each heading and figure, shown on hover, focus or touch, over the page, which does not move.
const WORDS = {
  "workers": "Worker processes that have a rank in the current round. After “of”: all worker processes.",
  "hosts": "Hosts that discovery lists and that are up.",
  "round": "The number of the current round. A round is a set of workers with fixed ranks; each change of the workers starts a new one.",
  "newest commit": "The number of the newest commit: where training resumes after a failure. It decreases if a failure loses commits.",
  "steps per second": "Training steps per second: the median of the workers that report steps.",
  "steps": "Training steps so far, including those that were repeated after a failure.",
  "goodput": "The share of the job's time spent on training that was kept.",
  "resets": "How often training was interrupted to form another round.",
  "runs for": "The time since the job started.",
  "timeline": "What happened when, to scale. The events below say the same in words.",
  "curves": "The job's figures over time, for the time range chosen above. Point at a curve, or move the slider with the arrow keys, to read the values at that time. A gap means that there is no data.",
  "training steps": "Training steps per second, since the previous point.",
  "waiting": "The share of their time that the workers spent waiting for others in collectives.",
  "processor": "CPU cores that all workers together keep busy: 2 means two fully busy cores.",
  "memory": "Main memory used by all workers.",
  "gpu": "How busy the workers' GPUs were, on average.",
  "gpu memory": "Memory used on all GPUs of the workers.",
  "reported": "A figure that the training script reports: the latest value, from the lowest rank that reports it.",
  "where the time went": "The job's time, by what it was spent on.",
  "training": "Training that was kept.",
  "recomputed": "Training that a failure undid, back to the last commit, and that was repeated.",
  "reset": "Forming a new round: from a change of the workers until training resumed.",
  "stalled": "The round is running, but no worker completes a step.",
  "waiting for slots": "There were fewer slots than the job needs.",
  "start": "From the start of the job until it first trained.",
  "idle": "Nothing is left to train: some workers have finished, or the job is ending.",
  "unexplained": "The driver was suspended or starved of CPU time, and does not know what the workers did meanwhile.",
  "hosts and workers": "Each host, with the workers that run on it. Select a host's name to collapse or expand it.",
  "ended workers": "The workers that ended last: how each ended, and its last output.",
  "worker": "A worker: its rank in the current round, and its slot on the host.",
  "phase": "What the worker is doing, in the words of elasticrun status.",
  "for": "How long the worker has been in this phase.",
  "restarts": "How many earlier workers had this slot: the number after # in the worker's name.",
  "commit": "The newest commit that this worker has reported.",
  "worker steps": "Training steps that this worker completes per second.",
  "worker memory": "Main memory used by this worker.",
  "worker processor": "CPU time that this worker uses: 100 % means one fully busy core.",
  "waits": "How long the worker has been waiting in a collective.",
  "rank": "The worker's last rank.",
  "how": "How the worker's process ended: its exit code, the signal that killed it, or why it was stopped.",
  "when": "When the worker's process ended.",
  "warnings": "What went wrong, or may go wrong, newest first.",
  "events": "What happened, newest first.",
  "discovery": "The hosts in the last result of discovery, with their slots.",
  "commits on disk": "The folders of --durable-dir, with the newest complete commit in each.",
  "rounds": "Each block is a round; its height is the number of workers.",
  "host listed": "Discovery lists this host.",
  "lost": "A worker died or hung, or a host was lost.",
};
function word(key, text) {
  const id = "w-" + key.replaceAll(" ", "-");
  if (!$(id)) $("words").append(make("span", { id }, WORDS[key]));
  const node = make("button", { type: "button", class: "word", "aria-describedby": id, "data-help": key }, text);
  node.addEventListener("focus", () => showHelp(node));
  node.addEventListener("blur", () => hideHelp());
  node.addEventListener("click", () => showHelp(node));
  return node;
}
let helped = null, helpTimer = 0;
function showHelp(node) {
  const help = $("help");
  clearTimeout(helpTimer);
  helped = node;
  put(help, WORDS[node.dataset.help]);
  help.hidden = false;
  const at = node.getBoundingClientRect(), size = help.getBoundingClientRect(), width = document.documentElement.clientWidth;
  help.style.left = Math.max(8, Math.min(at.left, width - size.width - 8)) + "px";
  help.style.top = (at.bottom + size.height + 8 < innerHeight ? at.bottom + 4 : Math.max(4, at.top - size.height - 4)) + "px";
}
function hideHelp() { clearTimeout(helpTimer); helped = null; $("help").hidden = true; }
// The pointer may move onto the help itself, to read or copy it.
function hideHelpSoon() { clearTimeout(helpTimer); helpTimer = setTimeout(() => { if (document.activeElement !== helped) hideHelp(); }, 250); }
for (const name of ["pointerover", "pointerout"]) document.addEventListener(name, event => {
  const node = event.target.closest?.(".word, #help");
  if (!node || event.pointerType !== "mouse") return;
  if (name === "pointerout") hideHelpSoon();
  else if (node.id === "help") clearTimeout(helpTimer);
  else showHelp(node);
});
document.addEventListener("pointerdown", event => { if (!event.target.closest?.(".word, #help")) hideHelp(); });
document.addEventListener("keydown", event => { if (event.key === "Escape" && !$("help").hidden) { hideHelp(); event.preventDefault(); } });
addEventListener("scroll", () => { if (helped) document.activeElement === helped ? showHelp(helped) : hideHelp(); }, { passive: true });
for (const node of document.querySelectorAll("[data-word]")) node.replaceChildren(word(node.dataset.word, node.textContent));
