// Figures from snapshots of /dashboard/data: sums, differences, quantiles. No document in here.

/** newer - older for nested objects and arrays of counts; what is no number is taken from newer. */
export function difference(newer, older) {
  if (typeof newer === "number") return newer - (typeof older === "number" ? older : 0);
  if (Array.isArray(newer)) return newer.map((v, i) => difference(v, older?.[i]));
  if (newer !== null && typeof newer === "object") {
    return Object.fromEntries(
      Object.entries(newer).map(([key, value]) => [key, difference(value, older?.[key])]),
    );
  }
  return newer;
}

/** Sum of nested objects and arrays of counts; names that differ become "". */
export function sum(a, b) {
  if (a === undefined) return b;
  if (b === undefined) return a;
  if (typeof a === "number") return a + b;
  if (Array.isArray(a)) {
    const [long, short] = a.length < b.length ? [b, a] : [a, b];
    return long.map((v, i) => (i < short.length ? sum(v, short[i]) : v));
  }
  if (a !== null && typeof a === "object") {
    const all = { ...a };
    for (const [key, value] of Object.entries(b)) all[key] = sum(a[key], value);
    return all;
  }
  return a === b ? a : "";
}

const GAUGES = [
  "up", "running", "waiting", "waiting_tokens", "kv_usage", "draft_budget", "vocab_size",
];

/** The lists of a snapshot: what an entry is found by, and its members that are no counts. */
const LISTS = {
  tasks: [["task", "model"], []],
  drafts: [["task", "drafter", "model"], []],
  slices: [["task", "mode", "model"], ["ids"]],
  engines: [["name"], [...GAUGES, "restarts"]],
};

/** What happened between two snapshots; older null means since the server started. */
export function between(newer, older) {
  const span = {
    seconds: older === null ? null : newer.now_s - older.now_s,
    edges_s: newer.edges_s,
  };
  for (const [list, [names, kept]] of Object.entries(LISTS)) {
    const key = (entry) => names.map((name) => entry[name]).join("\0");
    const before = new Map((older?.[list] ?? []).map((entry) => [key(entry), entry]));
    span[list] = newer[list].map((entry) => ({
      ...difference(entry, before.get(key(entry))),
      ...Object.fromEntries(kept.map((name) => [name, entry[name]])),
    }));
  }
  return span;
}

/** One entry for all drafts (and one for all tasks) that a filter lets through. */
export function total(entries) {
  return entries.reduce((all, entry) => sum(all, entry), undefined) ?? {};
}

/** a / b, or null when there is nothing to divide by. */
export function ratio(a, b) {
  return b > 0 ? (a ?? 0) / b : null;
}

/** The q-quantile of bucket counts with these upper edges (the last bucket has none), or null. */
export function quantile(edges, counts, q) {
  const all = (counts ?? []).reduce((a, b) => a + b, 0);
  if (!(all > 0)) return null;
  let rank = q * all;
  for (let i = 0; i < counts.length; i++) {
    if (rank <= counts[i] && counts[i] > 0) {
      if (i >= edges.length) return edges[edges.length - 1];
      const low = i === 0 ? 0 : edges[i - 1];
      return low + ((edges[i] - low) * rank) / counts[i];
    }
    rank -= counts[i];
  }
  return edges[edges.length - 1];
}

export const NONE = "–";

/** A number with three digits or so. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** Server-sent events as they arrive: feed text, get the data of every complete event. */
export class EventReader {
  #rest = "";

  push(text) {
    this.#rest += text;
    const events = this.#rest.split("\n\n");
    this.#rest = events.pop();
    return events
      .filter((event) => event.startsWith("data: "))
      .map((event) => event.slice("data: ".length));
  }
}
