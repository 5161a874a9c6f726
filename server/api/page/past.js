// The last hour: the server's points, every ten seconds, and this page's own snapshots since.

import { ratio } from "./figures.js";

/** A point as /dashboard/history has them, from a snapshot of /dashboard/data. */
export function pointOf(snapshot) {
  const all = (of) => snapshot.engines.reduce((sum, engine) => sum + (of(engine) ?? 0), 0);
  return {
    now_s: snapshot.now_s,
    running: all((engine) => engine.running),
    engine_steps: all((engine) => engine.steps),
    draft_rows: all((engine) => engine.rows?.draft),
    drafts: snapshot.drafts.map((d) => [
      d.task, d.model, d.tokens ?? 0, d.steps ?? 0, d.drafted ?? 0, d.accepted ?? 0,
    ]),
  };
}

/** The server's points, and those of `own` that are newer. */
export function joined(told, own) {
  const last = told.at(-1)?.now_s ?? -Infinity;
  return [...told, ...own.filter((point) => point.now_s > last + 0.5)];
}

const sums = (point, task) =>
  point.drafts
    .filter((entry) => task === "" || entry[0] === task)
    .reduce((all, entry) => all.map((v, i) => v + entry[i + 2]), [0, 0, 0, 0]);

/** What happened between each two points in turn, no longer ago than `length` seconds. */
export function rates(points, task, length) {
  const now = points.at(-1)?.now_s ?? 0;
  const found = [];
  for (let i = 1; i < points.length; i++) {
    const [older, newer] = [points[i - 1], points[i]];
    const span = newer.now_s - older.now_s;
    const age_s = now - newer.now_s;
    if (age_s > length || span <= 0) continue;
    const before = sums(older, task);
    const [tokens, steps, drafted, accepted] = sums(newer, task).map((v, k) => v - before[k]);
    const engineSteps = newer.engine_steps - older.engine_steps;
    if (tokens < 0 || engineSteps < 0) continue; // the server was restarted
    found.push({
      age_s,
      perSecond: tokens / span,
      perStep: ratio(tokens, steps),
      accepted: ratio(accepted, drafted),
      draftRows: ratio(newer.draft_rows - older.draft_rows, engineSteps),
      running: newer.running,
    });
  }
  return found;
}
