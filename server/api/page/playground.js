// The playground: streams a completion and shows who drafted each token, and what was rejected.

import { call } from "./access.js";
import { byId, element, fill } from "./dom.js";
import { EventReader, number, percent, ratio, seconds } from "./figures.js";

const EXAMPLE = `Turn each line into JSON.

Line: Ada Lovelace was born in London in 1815.
JSON: {"name": "Ada Lovelace", "place": "London", "year": 1815}
Line: Alan Turing was born in Maida Vale in 1912.
JSON: {"name": "Alan Turing", "place": "Maida Vale", "year": 1912}
Line: Grace Hopper was born in New York City in 1906.
JSON:`;

const MAX_SHOWN = 3; // rejected paths shown at one place; the table below has all

const answer = byId("answer");
const run = byId("run");
const status = byId("play-state");
let controller = null;

function say(text, bad = false) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

async function offerModels() {
  try {
    const response = await call("v1/models");
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const { data } = await response.json();
    byId("model").replaceChildren(
      ...data.map((model) => element("option", { value: model.id }, model.id)),
    );
  } catch (error) {
    say(`The models cannot be listed: ${error.message}`, true);
  }
}

function order() {
  const drafting = byId("drafting").value;
  return {
    model: byId("model").value,
    prompt: byId("prompt").value,
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    include_speculation: true,
    include_token_sources: true,
    include_rejected_drafts: true,
    ...(drafting ? { speculation: { drafter: drafting } } : {}),
  };
}

function rejectedPath(path) {
  const title = `rejected draft from: ${path.source}`;
  return element("del", { "aria-hidden": "true", title }, path.text);
}

/** What arrived of a completion, and its picture. */
class Answer {
  steps = []; // {drafted, own, rejected}: one chunk is one step of the server
  num = 0;
  length = 0; // characters so far
  usage = null;
  report = null;
  finish = null;
  firstAt = null;
  lastAt = null;

  constructor() {
    this.began = performance.now();
    this.seen = new Set();
    answer.replaceChildren();
    byId("legend").replaceChildren();
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.usage = chunk.usage ?? this.usage;
    this.report = chunk.speculation ?? this.report;
    for (const choice of chunk.choices) {
      this.finish = choice.finish_reason ?? this.finish;
      const runs = choice.token_sources ?? [];
      if (runs.length) {
        this.lastAt = performance.now();
        this.firstAt ??= this.lastAt;
        this.#add(runs, choice.rejected_drafts ?? []);
      }
    }
  }

  /** One chunk. A run's text is cut where a rejected draft stood. */
  #add(runs, rejected) {
    const parts = document.createDocumentFragment();
    const waiting = [...rejected].sort((one, other) => one.offset - other.offset);
    for (const { source, tokens, text } of runs) {
      this.num += tokens;
      const characters = [...text];
      const end = this.length + characters.length;
      const kind = source === null ? {} : { class: `drafted ${source}`, title: `drafted from: ${source}` };
      const add = (from, to) => {
        if (to > from) {
          const part = characters.slice(from - this.length, to - this.length).join("");
          parts.append(element("span", kind, part));
        }
      };
      let at = this.length;
      while (waiting.length && (waiting[0].offset < end || source === null)) {
        const here = Math.max(at, Math.min(waiting[0].offset, end));
        add(at, here);
        at = here;
        const same = waiting.filter((path) => path.offset === waiting[0].offset);
        waiting.splice(0, same.length);
        parts.append(...same.slice(0, MAX_SHOWN).map(rejectedPath));
      }
      add(at, end);
      this.length = end;
      if (source !== null && !this.seen.has(source)) {
        this.seen.add(source);
        byId("legend").append(
          element("li", {}, element("span", { class: `drafted ${source}` }, source), " drafted and accepted"),
        );
      }
    }
    parts.append(...waiting.slice(0, MAX_SHOWN).map(rejectedPath));
    answer.append(parts);
    const text = (own) =>
      runs.filter((run) => (run.source === null) === own).map((run) => run.text).join("");
    this.steps.push({ drafted: text(false), own: text(true), rejected: rejected.map((r) => r.text) });
  }

  end(stopped) {
    const num = this.num;
    const gap = num > 1 ? (this.lastAt - this.firstAt) / (num - 1) / 1000 : null;
    const report = this.report;
    const speed = [
      this.firstAt === null ? "" : `First token after ${seconds((this.firstAt - this.began) / 1000)}`,
      gap === null ? "" : `then ${seconds(gap)} per token`,
    ].filter(Boolean).join(", ");
    const drafts = report
      ? `in ${report.steps} steps: ${number(report.mean_tokens_per_step)} tokens per step. ` +
        `${report.drafted_tokens} rows drafted, ${report.accepted_tokens} accepted` +
        ` (${percent(ratio(report.accepted_tokens, report.drafted_tokens))}).`
      : "so far.";
    say(`${stopped ? "Stopped. " : ""}${num} tokens ${drafts} ${speed}${speed ? "." : ""}`);
    byId("legend").append(
      element("li", {}, "plain text: the model's own"),
      element("li", {}, element("del", {}, "struck out"), " drafted and rejected"),
    );
    this.#table();
  }

  #table() {
    const rows = this.steps.map((step, i) => ({
      name: String(i + 1),
      drafted: step.drafted,
      own: step.own,
      rejected: step.rejected.map((text) => JSON.stringify(text)).join(", "),
    }));
    fill(
      byId("steps"),
      [
        { title: "Step", of: (r) => r.name },
        { title: "Drafted and accepted", text: true, of: (r) => r.drafted },
        { title: "The model's own", text: true, of: (r) => r.own },
        { title: "Rejected", text: true, of: (r) => r.rejected },
      ],
      rows,
      "No step was made.",
    );
  }
}

async function complete() {
  controller = new AbortController();
  run.textContent = "Stop";
  say("Running");
  const arrived = new Answer();
  let stopped = false;
  try {
    const response = await call("v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(order()),
      signal: controller.signal,
    });
    if (!response.ok) {
      const problem = await response.json().catch(() => null);
      throw new Error(problem?.error?.message ?? `The server answered ${response.status}.`);
    }
    const reader = new EventReader();
    const decoder = new TextDecoder();
    for await (const bytes of chunksOf(response.body)) {
      for (const data of reader.push(decoder.decode(bytes, { stream: true }))) {
        if (data !== "[DONE]") arrived.take(JSON.parse(data));
      }
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) {
      say(error.message, true);
      return;
    }
  } finally {
    controller = null;
    run.textContent = "Run";
  }
  arrived.end(stopped);
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

byId("play").addEventListener("submit", (event) => {
  event.preventDefault();
  if (controller) controller.abort();
  else complete();
});
byId("try").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && controller) controller.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !controller) {
    event.preventDefault();
    byId("play").requestSubmit();
  }
});
byId("show-rejected").addEventListener("change", (event) => {
  answer.classList.toggle("with-rejected", event.target.checked);
});
answer.classList.add("with-rejected");
byId("prompt").value = EXAMPLE;
offerModels();
