// Throughput since the page is open, from counts of records that were ever appended.

import { rate } from "./format.js";
import { KEPT_MS, showLines } from "./lines.js";

// A tile says the average of so long.
const SMOOTH_MS = 10_000;

let readings = [];

// Notes a look, draws, and returns the present rates; null where they are not known yet.
export function showTraffic(look) {
  const { taken_in: taken, released } = look.totals;
  readings.push({ at: look.at_ms, in: taken, out: released });
  readings = readings.filter((each) => each.at > look.at_ms - KEPT_MS);
  const now = { in: lately("in"), out: lately("out") };
  const said = (number) => (number == null ? "not known" : `${rate(number)} a second`);
  showLines("traffic", look.at_ms, ["in", "out"].map((which) => [which, points(which)]),
    `Taken in: ${said(now.in)}; left the wheel: ${said(now.out)}.`);
  return now;
}

function lately(which) {
  const last = readings.at(-1);
  const first = readings.find((each) => each.at >= last.at - SMOOTH_MS);
  return between(first, last, which);
}

function between(first, last, which) {
  // A topic that was deleted and made anew begins at 0 again.
  if (first[which] == null || last[which] == null || last.at <= first.at || last[which] < first[which]) return null;
  return ((last[which] - first[which]) / (last.at - first.at)) * 1_000;
}

function points(which) {
  return readings.slice(1).flatMap((each, index) => {
    const value = between(readings[index], each, which);
    return value == null ? [] : [{ at: each.at, value }];
  });
}
