// A streamed answer and its picture: who drafted each token, and what was rejected.

import { element, fill } from "./dom.js";
import { number, percent, ratio, seconds } from "./figures.js";

const MAX_SHOWN = 3; // rejected paths shown at one place; the table below has all

function rejectedPath(path) {
  const title = `rejected draft from: ${path.source}`;
  return element("del", { "aria-hidden": "true", title }, path.text);
}

/** What arrived of a completion, and its picture. */
export class Answer {
  steps = []; // {name, text, drafted, own, rejected}: one chunk is one step of the server
  num = 0;
  length = 0; // characters so far
  usage = null;
  report = null;
  finish = null;
  firstAt = null;
  lastAt = null;

  /** place: where the text goes. legend, table: what explains it; null for neither. */
  constructor(place, legend, table) {
    this.place = place;
    this.legend = legend;
    this.table = table;
    this.began = performance.now();
    this.seen = new Set();
    place.replaceChildren();
    legend?.replaceChildren();
  }

  /** Seconds a token took, behind the first; null for fewer than two. */
  get gap() {
    return this.num > 1 ? (this.lastAt - this.firstAt) / (this.num - 1) / 1000 : null;
  }

  /** The whole text, without rejected drafts. */
  get text() {
    return this.steps.map((step) => step.text).join("");
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
        this.legend?.append(
          element("li", {}, element("span", { class: `drafted ${source}` }, source), " drafted and accepted"),
        );
      }
    }
    parts.append(...waiting.slice(0, MAX_SHOWN).map(rejectedPath));
    this.place.append(parts);
    const text = (own) =>
      runs.filter((run) => (run.source === null) === own).map((run) => run.text).join("");
    this.steps.push({
      name: String(this.steps.length + 1),
      text: runs.map((run) => run.text).join(""),
      drafted: text(false),
      own: text(true),
      rejected: rejected.map((path) => JSON.stringify(path.text)).join(", "),
    });
  }

  /** One sentence on how it went; call `explain` for the rest. */
  summary(stopped) {
    const report = this.report;
    const speed = [
      this.firstAt === null ? "" : `First token after ${seconds((this.firstAt - this.began) / 1000)}`,
      this.gap === null ? "" : `then ${seconds(this.gap)} per token`,
    ].filter(Boolean).join(", ");
    const drafts = report
      ? `in ${report.steps} steps: ${number(report.mean_tokens_per_step)} tokens per step. ` +
        `${report.drafted_tokens} rows drafted, ${report.accepted_tokens} accepted` +
        ` (${percent(ratio(report.accepted_tokens, report.drafted_tokens))}).`
      : "so far.";
    return `${stopped ? "Stopped. " : ""}${this.num} tokens ${drafts} ${speed}${speed ? "." : ""}`;
  }

  /** What the colours mean, and the answer step by step. */
  explain() {
    this.legend?.append(
      element("li", {}, "plain text: the model's own"),
      element("li", {}, element("del", {}, "struck out"), " drafted and rejected"),
    );
    if (!this.table) return;
    fill(
      this.table,
      [
        { title: "Step", of: (r) => r.name },
        { title: "Drafted and accepted", text: true, of: (r) => r.drafted },
        { title: "The model's own", text: true, of: (r) => r.own },
        { title: "Rejected", text: true, of: (r) => r.rejected },
      ],
      this.steps,
      "No step was made.",
    );
  }
}
