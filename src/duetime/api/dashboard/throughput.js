// Throughput since the page was opened, from counts of all records so far.

import { ChartTable, grid, LEFT, roundUp } from "./charts.js";
import { byId, draw } from "./dom.js";
import { rate, tick } from "./format.js";

const KEPT_MS = 600_000;
const HEIGHT = 150, TOP = 8, BOTTOM = 22;

// A tile has the average of so long.
const SMOOTH_MS = 10_000;

const words = (number) => (number == null ? "not known" : rate(number));
const COLUMNS = [
  { head: "At", kind: "time", cell: (each) => tick(each.at, KEPT_MS) },
  { head: "Taken in, a second", kind: "number", cell: (each) => words(each.in) },
  { head: "Left the wheel, a second", kind: "number", cell: (each) => words(each.out) },
];
const table = new ChartTable("throughput-table", "Throughput", COLUMNS);

let readings = [];

// Adds a snapshot, draws, and returns the present rates; null where they are not known.
export function showThroughput({ at_ms: at, totals }) {
  readings = [...readings.filter((each) => each.at > at - KEPT_MS), { at, in: totals.taken_in, out: totals.released }];
  const now = { in: recentRate("in"), out: recentRate("out") };
  showLines("throughput", at, ["in", "out"].map((which) => [which, points(which)]),
    `Records a second: taken in ${words(now.in)}; left the wheel ${words(now.out)}.`);
  table.show(rates().toReversed());
  return now;
}

function recentRate(which) {
  const last = readings.at(-1);
  return rateBetween(readings.find((each) => each.at >= last.at - SMOOTH_MS), last, which);
}

function rateBetween(first, last, which) {
  // A topic that was deleted and created again begins at 0.
  if (first[which] == null || last[which] == null || last.at <= first.at || last[which] < first[which]) return null;
  return ((last[which] - first[which]) / (last.at - first.at)) * 1_000;
}

const rates = () => readings.slice(1).map((each, index) => {
  const rateOf = (which) => rateBetween(readings[index], each, which);
  return { at: each.at, in: rateOf("in"), out: rateOf("out") };
});

const points = (which) =>
  rates().filter((each) => each[which] != null).map((each) => ({ at: each.at, value: each[which] }));

// Draws lines of [class, [{ at, value }, ...]] up to now; `label` is the text for screen readers.
function showLines(id, nowMs, lines, label) {
  const width = Math.max(280, byId(id).clientWidth), floor = HEIGHT - BOTTOM;
  const all = lines.flatMap(([, points]) => points);
  const begin = Math.min(nowMs - 60_000, ...all.map((each) => each.at));
  const most = roundUp(Math.max(1, ...all.map((each) => each.value)));
  const x = (ms) => LEFT + ((ms - begin) / (nowMs - begin)) * (width - LEFT);
  const y = (number) => floor - (number / most) * (floor - TOP);
  const drawn = lines.map(([kind, points]) =>
    draw("polyline", { class: kind, points: points.map((each) => `${x(each.at)},${y(each.value)}`).join(" ") }));
  const times = [[begin, "start"], [nowMs, "end"]].map(([ms, anchor]) =>
    draw("text", { x: x(ms), y: floor + 17, "text-anchor": anchor }, tick(ms, KEPT_MS)));
  byId(id).replaceChildren(draw("svg",
    { role: "img", "aria-label": label, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` },
    ...grid(most, y, width), ...times, ...drawn));
}
