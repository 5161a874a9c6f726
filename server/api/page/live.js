// The figures: polls dashboard/data, keeps the last minutes, draws. What was before the page was
// opened is asked of the server: its figures of the last minutes, its points of the last hour.

import { access, call } from "./access.js";
import { Chart } from "./chart.js";
import { bar, byId, element, fill, replaceIfNew } from "./dom.js";
import { between, NONE, number, percent, quantile, ratio, seconds, total } from "./figures.js";
import { joined, pointOf, rates } from "./past.js";

const POLL_MS = 2000;
const KEEP_S = 310;
const ASK_PAST_MS = 10_000;

const history = [];
let past = []; // the server's points of the last hour
let askedPast = -Infinity;
let paused = false;
let timer = 0;

const taskSelect = byId("task");
const windowSelect = byId("window");
const state = byId("state");

function tell(text, bad = false) {
  if (state.textContent !== text) state.textContent = text;
  state.classList.toggle("bad", bad);
}

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    const response = await call("dashboard/data");
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const snapshot = await response.json();
    access.needsKey = snapshot.needs_key;
    if (paused) return;
    await askPast(snapshot);
    take(snapshot);
  } catch (error) {
    tell(`No figures: ${error.message}`, true);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

/** The server's points that are not here yet; the oldest go after an hour. */
async function askPast(snapshot) {
  if (performance.now() - askedPast < ASK_PAST_MS) return;
  askedPast = performance.now();
  const after = past.at(-1)?.now_s ?? "";
  const response = await call(`dashboard/history?after=${after}`);
  if (!response.ok) return;
  const { points, recent } = await response.json();
  if (history.length === 0) history.push(...(recent ?? []).filter((s) => s.now_s < snapshot.now_s));
  past = [...past, ...points].filter((point) => snapshot.now_s - point.now_s < 3700);
}

let first = true;

function take(snapshot) {
  const last = history.at(-1);
  if (last && numSteps(snapshot) < numSteps(last)) {
    history.length = 0; // the server was restarted
    past = [];
  }
  if (first && numSteps(snapshot) === 0) {
    byId("main").prepend(byId("try")); // nothing to see yet: something to try
  }
  first = false;
  history.push(snapshot);
  while (history.length > 2 && snapshot.now_s - history[0].now_s > KEEP_S) history.shift();
  draw();
}

const numSteps = (snapshot) => snapshot.drafts.reduce((all, entry) => all + (entry.steps ?? 0), 0);

/** The snapshot that the chosen window begins with; null is the server's start. */
function windowStart(newest) {
  const length = Number(windowSelect.value);
  if (length === 0) return null;
  return history.find((old) => newest.now_s - old.now_s <= length + 0.5) ?? newest;
}

function draw() {
  const newest = history.at(-1);
  if (!newest) return;
  byId("version").textContent = newest.version;
  const states = newest.engines.map((engine) => engine.state);
  const ready = states.filter((s) => s === "ready").length;
  tell(
    ready === states.length
      ? `Live: ${ready === 1 ? "the engine is" : `all ${ready} engines are`} ready`
      : `${ready} of ${states.length} engines ready`,
    ready < states.length,
  );
  offerTasks(newest);

  const task = taskSelect.value;
  const wanted = (entry) => task === "" || entry.task === task;
  const start = windowStart(newest);
  const span = between(newest, start);
  const drafts = total(span.drafts.filter(wanted));
  const tasks = total(span.tasks.filter(wanted));
  const engines = total(span.engines);
  const busy = (drafts.steps ?? 0) > 0;
  byId("span").textContent = !busy
    ? "Nothing was generated in this time."
    : start === null
      ? "All since the server started."
      : `The last ${seconds(span.seconds)}.`;

  // For a time in which nothing was generated: all since the start.
  const told = busy || start === null ? drafts : total(between(newest, null).drafts.filter(wanted));
  const since = told !== drafts && told.steps > 0 ? "Since the start: " : "";
  const between_s = busy ? quantile(span.edges_s, tasks.inter_token, 0.5) : null;
  byId("headline").textContent =
    `${since}${headline(told)}` +
    (between_s === null ? "" : ` ${seconds(between_s)} between two tokens of an answer, the median.`);
  drawTiles(newest, span, drafts, tasks, engines);
  drawCharts(task);
  drawTasks(span, wanted);
  drawDrafts(drafts);
  drawSlices(newest, span, wanted);
  drawEngines(span);
  drawOpen(newest, wanted);
}

function offerTasks(newest) {
  const names = [...new Set(newest.tasks.map((entry) => entry.task))].sort();
  const chosen = taskSelect.value;
  replaceIfNew(taskSelect, names.join("\0"), () => [
    element("option", { value: "" }, "all tasks"),
    ...names.map((name) => element("option", { value: name }, name)),
  ]);
  taskSelect.value = names.includes(chosen) ? chosen : "";
}

/** What drafting did, in a sentence. */
function headline(drafts) {
  const perStep = ratio(drafts.tokens, drafts.steps);
  if (perStep === null) return "Nothing to show yet: ask something in the playground.";
  if (!(drafts.drafted > 0)) return "One token a step: nothing was drafted.";
  const saved = 1 - 1 / perStep;
  return `${number(perStep)} tokens a step, those that end prompts counted: ` +
    `the same text in ${percent(saved)} fewer steps of the model.`;
}

function drawTiles(newest, span, drafts, tasks, engines) {
  const q = (counts, at) => seconds(quantile(span.edges_s, counts, at));
  const num = span.engines.length || 1;
  const tiles = [
    ["Running", number(engines.running), `${number(engines.waiting)} waiting`,
      "requests in the engines, and in the queue"],
    ["Tokens per second", number(span.seconds ? (drafts.tokens ?? 0) / span.seconds : null), "",
      "of all answers together"],
    ["Tokens per step", number(ratio(drafts.tokens, drafts.steps)), "all decode steps",
      "1 is what a model does without drafts"],
    ["Accepted of verified rows", percent(ratio(drafts.accepted, drafts.drafted)),
      `${number(drafts.wasted ?? 0)} wasted`, "how many drafted tokens were right"],
    ["First token", q(tasks.ttft, 0.5), `95 %: ${q(tasks.ttft, 0.95)}`,
      "from the request to its first token"],
    ["Between tokens", q(tasks.inter_token, 0.5), `95 %: ${q(tasks.inter_token, 0.95)}`,
      "after the first one"],
    ["Whole answer", q(tasks.end_to_end, 0.5), `95 %: ${q(tasks.end_to_end, 0.95)}`,
      "from the request to the last token"],
    ["Draft rows a step", number(ratio(engines.rows?.draft, engines.steps)),
      `budget now ${number(engines.draft_budget)}`, "tokens tried ahead in a step"],
    ["KV cache in use", percent((engines.kv_usage ?? 0) / num),
      `${percent(ratio(engines.prefix_hits, engines.prefix_queries))} prefix hits`,
      "memory of running texts; prompts found in it"],
    ["Errors", number(tasks.outcomes?.error ?? 0), `${number(tasks.outcomes?.ok ?? 0)} answered`,
      "requests that failed in the server"],
  ];
  const list = byId("tiles");
  if (list.children.length !== tiles.length) {
    list.replaceChildren(
      ...tiles.map(([title, , , help]) =>
        element(
          "div",
          {},
          element("dt", {}, title, element("span", { class: "help" }, help)),
          element("dd", {}, ""),
        ),
      ),
    );
  }
  tiles.forEach(([, value, more], i) => {
    const place = list.children[i].lastChild;
    const text = `${value}\0${more}`;
    replaceIfNew(place, text, () => [`${value} `, element("small", {}, more)]);
  });
}

const CHARTS = [
  { title: "Tokens per second", help: "of all answers together", of: (r) => r.perSecond },
  { title: "Tokens per step", help: "1 is what a model does without drafts", of: (r) => r.perStep },
  {
    title: "Accepted rows",
    help: "how many drafted tokens were right",
    of: (r) => r.accepted,
    show: percent,
  },
  {
    title: "Draft rows a step",
    help: "tokens tried ahead in a step",
    of: (r) => r.draftRows,
    second: "running requests",
    other: (r) => r.running,
  },
].map((spec) => ({ ...spec, chart: new Chart(spec) }));

function drawCharts(task) {
  const length = Number(byId("past").value);
  const found = rates(joined(past, history.map(pointOf)), task, length);
  const shown = Math.min(length, Math.max(60, found[0]?.age_s ?? 0));
  const box = byId("charts");
  if (!box.children.length) box.append(...CHARTS.map(({ chart }) => chart.figure));
  for (const { chart, of, other, show } of CHARTS) {
    const points = found.map((r) => ({ age_s: r.age_s, value: of(r), other: other?.(r) }));
    chart.draw(points, shown, show ?? number);
  }
}

function drawTasks(span, wanted) {
  const rows = span.tasks
    .filter(wanted)
    .map((entry) => {
      const drafts = total(
        span.drafts.filter((d) => d.task === entry.task && d.model === entry.model),
      );
      const q = (counts, at) => seconds(quantile(span.edges_s, counts, at));
      return {
        name: entry.task,
        model: entry.model,
        answered: entry.outcomes?.ok ?? 0,
        failed: entry.outcomes?.error ?? 0,
        tokens: drafts.tokens ?? 0,
        perStep: ratio(drafts.tokens, drafts.steps),
        accepted: ratio(drafts.accepted, drafts.drafted),
        wasted: drafts.wasted ?? 0,
        ttft: q(entry.ttft, 0.5),
        between: q(entry.inter_token, 0.5),
        whole: q(entry.end_to_end, 0.95),
      };
    })
    .filter((row) => row.tokens > 0 || row.answered > 0 || row.failed > 0);
  fill(
    byId("tasks"),
    [
      { title: "Task", of: (r) => r.name },
      { title: "Model", of: (r) => r.model },
      { title: "Answered", of: (r) => number(r.answered) },
      { title: "Failed", of: (r) => number(r.failed) },
      { title: "Tokens", of: (r) => number(r.tokens) },
      { title: "Tokens per step", of: (r) => number(r.perStep) },
      { title: "Accepted", of: (r) => percent(r.accepted) },
      { title: "Wasted rows", of: (r) => number(r.wasted) },
      { title: "First token", of: (r) => r.ttft },
      { title: "Between", of: (r) => r.between },
      { title: "Whole, 95 %", of: (r) => r.whole },
    ],
    rows,
    "No task had a request in this time.",
  );
}

/** A table of the drafted rows by one label. titles: of the label, the rows and the accepted share. */
function drawShares(id, titles, drafted = {}, accepted = {}, shown, sorted = (a, b) => a - b) {
  const rows = Object.keys(drafted)
    .filter((name) => drafted[name] > 0)
    .sort(sorted)
    .map((name) => ({ name, rows: drafted[name], share: ratio(accepted[name], drafted[name]) }));
  fill(
    byId(id),
    [
      { title: titles[0], of: (r) => shown(r.name) },
      { title: titles[1], of: (r) => number(r.rows) },
      { title: titles[2], of: (r) => percent(r.share) },
      { title: "Share", meter: true, of: (r) => bar(r.share) },
    ],
    rows,
    "No drafts in this time.",
  );
}

function drawDrafts(drafts) {
  drawShares(
    "positions",
    ["Position", "Drafts", "Accepted"],
    drafts.offered_by_position,
    drafts.accepted_by_position,
    (position) => String(Number(position) + 1),
  );
  const drafted = drafts.drafted_by_source;
  drawShares(
    "sources",
    ["Source", "Rows", "Accepted"],
    drafted,
    drafts.accepted_by_source,
    // One index holds a task's corpus and what it has learned.
    (name) => element("span", { class: `drafted ${name}` },
      name === "corpus" ? "corpus, learned answers" : name),
    (a, b) => drafted[b] - drafted[a],
  );
  drawShares(
    "survivals",
    ["Claimed", "Rows", "Observed"],
    drafts.drafted_by_survival,
    drafts.accepted_by_survival,
    (tenth) => {
      const least = Number(tenth) * 100;
      return `${least.toFixed(0)}–${(least + 10).toFixed(0)}\u00a0%`;
    },
  );
}

function drawSlices(newest, span, wanted) {
  const sizes = new Map(newest.engines.map((engine) => [engine.model, engine.vocab_size]));
  const rows = span.slices
    .filter(wanted)
    .map((entry) => ({ ...entry, steps: entry.slice_steps + entry.full_steps }))
    .filter((entry) => entry.steps > 0)
    .map((entry) => ({ ...entry, all: entry.steps * sizes.get(entry.model) }));
  byId("no-slices").hidden = rows.length > 0;
  byId("slices").hidden = rows.length === 0;
  fill(
    byId("slices"),
    [
      { title: "Task", of: (r) => r.task },
      { title: "Mode", of: (r) => r.mode },
      { title: "Ids", of: (r) => number(r.ids) },
      { title: "Head computed", of: (r) => percent(ratio(r.head_rows, r.all)) },
      { title: "Steps from it", of: (r) => percent(ratio(r.slice_steps, r.steps)) },
      { title: "Missed", of: (r) => (r.verified ? percent(ratio(r.misses, r.verified)) : NONE) },
      { title: "Tokens a window", of: (r) => number(ratio(r.verified, r.windows)) },
      { title: "Taken back", of: (r) => number(r.dropped) },
    ],
    rows,
    "",
  );
}

function drawEngines(span) {
  fill(
    byId("engines"),
    [
      { title: "Engine", of: (e) => e.name },
      { title: "Device", of: (e) => e.device },
      { title: "State", of: (e) => e.state },
      { title: "Running", of: (e) => number(e.running) },
      { title: "Waiting", of: (e) => number(e.waiting) },
      { title: "KV in use", of: (e) => percent(e.kv_usage) },
      { title: "Rows a step", of: (e) => number(ratio(rowsOf(e), e.steps)) },
      { title: "Draft budget", of: (e) => number(e.draft_budget) },
      { title: "Step", of: (e) => seconds(ratio(e.step_s, e.steps)) },
      { title: "Proposing", of: (e) => seconds(ratio(e.propose_s, e.steps)) },
      { title: "Preempted", of: (e) => number(e.preemptions) },
      { title: "Restarts", of: (e) => number(e.restarts) },
    ],
    span.engines,
    "There is no engine.",
  );
}

const rowsOf = (engine) => Object.values(engine.rows ?? {}).reduce((a, b) => a + b, 0);

function drawOpen(newest, wanted) {
  const rows = newest.open.filter(wanted);
  byId("open-note").textContent =
    newest.num_open > newest.open.length
      ? `The oldest ${newest.open.length} of ${newest.num_open}.`
      : "";
  fill(
    byId("open"),
    [
      { title: "Task", of: (r) => r.task },
      { title: "State", of: (r) => r.state },
      { title: "Age", of: (r) => seconds(r.age_s) },
      { title: "Prompt", of: (r) => number(r.prompt_tokens) },
      { title: "Tokens", of: (r) => `${r.tokens} of ${r.max_tokens}` },
      { title: "Tokens per step", of: (r) => number(ratio(r.tokens, r.steps)) },
      { title: "Accepted", of: (r) => percent(ratio(r.accepted, r.drafted)) },
      { title: "Drafter", of: (r) => r.drafter },
      { title: "Engine", of: (r) => r.engine },
    ],
    rows,
    "No request is open.",
  );
}

taskSelect.addEventListener("change", draw);
windowSelect.addEventListener("change", draw);
byId("past").addEventListener("change", draw);
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) tell("Paused");
  else poll();
});
document.addEventListener("visibilitychange", poll);
poll();
