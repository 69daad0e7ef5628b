// --- help on each word -------------------------------------------------------------------------------------------
// What a heading or a figure means. It is shown by hovering, by focus and by a touch, over the page, which stays as it is.
const WORDS = {
  "workers": "Processes of the training that have a rank in the present round; behind “of”, all that run.",
  "hosts": "Machines that the job knows now: listed by discovery, or with workers that still run.",
  "round": "The number of the present round. A round is a set of workers with fixed ranks; each change of the workers begins another.",
  "newest commit": "The number of the newest commit: what training goes back to after a loss. It goes back where a loss took commits with it.",
  "steps per second": "Training steps in a second: the median of the workers that tell of them.",
  "steps": "Training steps that the job has done so far, those that were done again after a loss included.",
  "goodput": "The share of the job's time in which it trained, and what it trained was kept.",
  "resets": "How often training was interrupted for another round.",
  "runs for": "The time since the job's driver started.",
  "timeline": "What happened when, drawn to scale. The story has the same in words.",
  "curves": "The job's figures over time, for the span that is chosen above. Point at one, or move the slider with the arrow keys, to read the values at a time. A gap: nobody knew.",
  "waiting": "The part of the workers' time in which they waited for others in collectives.",
  "processor": "Processors that all workers together keep busy. 2 are two processors that do nothing else.",
  "memory": "Main memory in use by the processes of all workers.",
  "gpu": "The part of the time in which the GPUs of the workers were busy, on average.",
  "gpu memory": "Memory in use on the GPUs of all workers.",
  "reported": "A figure of the training itself, as the worker with the lowest rank that reports it has told it last.",
  "where the time went": "The job's seconds, by what they were spent on.",
  "training": "Seconds of training that was kept.",
  "recomputed": "Training that was done again, because a loss took the steps since the last commit.",
  "reset": "From a change of the workers until training went on.",
  "stalled": "The round runs, and no worker finishes a step.",
  "waiting for slots": "There were fewer slots than the job needs at least.",
  "start": "From the start of the job until it trained for the first time. It is no loss.",
  "idle": "Nothing is left to train: workers end, or the job does.",
  "unexplained": "The driver itself stood still, so nobody knows what the job did.",
  "hosts and workers": "Each machine with the workers that run on it. Fold a host with its name.",
  "ended workers": "The workers that ended last, how they ended, and what they wrote last.",
  "worker": "A worker: its rank in the present round, and its slot on the host.",
  "phase": "What the worker does now, in the words of elasticrun status.",
  "since": "For how long it has been doing that.",
  "try": "How many workers had this slot before this one: the number behind # in the worker's name.",
  "commit": "The newest commit that this worker has told of.",
  "waits": "For how long the worker has been waiting in a collective.",
  "rank": "The rank that the worker had last.",
  "how": "How its process ended: its exit code, the signal that killed it, or why it was ended.",
  "when": "When its process ended.",
  "warnings": "What went wrong, or may, the latest first.",
  "story": "What happened, the latest first.",
  "discovery": "The hosts that discovery listed last, with their slots.",
  "commits on disk": "Folders of --durable-dir, and the newest commit that is whole in each.",
  "rounds": "Each area is a round, as high as it has workers.",
  "standing still": "Nobody trained: between two rounds, or in one in which no worker stepped.",
  "done again": "Training since the last commit, which a loss took, and which was done once more.",
  "host listed": "Discovery listed this host.",
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
// One may go over to the words themselves, to read or to copy them.
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
