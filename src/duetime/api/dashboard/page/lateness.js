// How late the API's own messages come, since the page is open: each reading is of the last minute.

import { KEPT_MS, showLines } from "./lines.js";

const LINES = [["p50", "p50_ms"], ["p99", "p99_ms"], ["max", "max_ms"]];

let readings = [];

// Notes a look, and draws.
export function showLateness({ at_ms: at, lateness }) {
  if (lateness?.samples) readings.push({ at, ...lateness });
  readings = readings.filter((each) => each.at > at - KEPT_MS);
  const lines = LINES.map(([kind, name]) => [kind, readings.map((each) => ({ at: each.at, value: each[name] }))]);
  showLines("lateness", at, lines, latenessWords(lateness));
}

export function latenessWords(lateness) {
  if (!lateness?.samples) return "Not measured yet.";
  const { p50_ms: p50, p99_ms: p99, max_ms: max } = lateness;
  return `Late by ${p50} ms at the median, ${p99} ms at p99 and ${max} ms at most.`;
}
