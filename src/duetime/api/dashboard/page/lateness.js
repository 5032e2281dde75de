// How late the API's own messages come, since the page is open: each reading is of the last minute.

import { count, tick } from "./format.js";
import { KEPT_MS, showLines } from "./lines.js";
import { Tabled } from "./tabled.js";

const LINES = [["p50", "p50_ms"], ["p99", "p99_ms"], ["max", "max_ms"]];

const ms = (head, name) => ({ head, kind: "number", cell: (each) => `${count(each[name])} ms` });
const COLUMNS = [
  { head: "At", kind: "time", cell: (each) => tick(each.at, KEPT_MS) },
  ms("Median", "p50_ms"), ms("p99", "p99_ms"), ms("Most", "max_ms"),
];
const tabled = new Tabled("lateness-table", "Lateness", COLUMNS);

let readings = [];

// Notes a look, and draws.
export function showLateness({ at_ms: at, lateness }) {
  if (lateness?.samples) readings.push({ at, ...lateness });
  readings = readings.filter((each) => each.at > at - KEPT_MS);
  const lines = LINES.map(([kind, name]) => [kind, readings.map((each) => ({ at: each.at, value: each[name] }))]);
  showLines("lateness", at, lines, latenessWords(lateness));
  tabled.show(readings.toReversed());
}

function latenessWords(lateness) {
  if (!lateness?.samples) return "Not measured now: a pipeline has to lead, and the first takes some seconds.";
  const { p50_ms: p50, p99_ms: p99, max_ms: max } = lateness;
  return `Late by ${p50} ms at the median, ${p99} ms at p99 and ${max} ms at most.`;
}
