// Records a second, of two totals that grow: in and out, since the page is open.

import { roundUp } from "./bins.js";
import { byId, draw } from "./dom.js";
import { rate, tick } from "./format.js";
import { grid } from "./waiting.js";

// Ten minutes.
const KEPT_MS = 600_000;
// A tile says the average of so long.
const SMOOTH_MS = 10_000;
const HEIGHT = 150, TOP = 8, BOTTOM = 22, LEFT = 44;

let readings = [];

// Notes a look, draws, and returns the present rates; null where they are not known yet.
export function showTraffic(look) {
  const { taken_in: taken, released } = look.totals;
  readings.push({ at: look.at_ms, in: taken, out: released });
  readings = readings.filter((each) => each.at > look.at_ms - KEPT_MS);
  const now = { in: lately("in"), out: lately("out") };
  byId("traffic").replaceChildren(chart(look.at_ms, now));
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

function chart(nowMs, now) {
  const width = Math.max(280, byId("traffic").clientWidth), floor = HEIGHT - BOTTOM;
  const begin = Math.min(readings[0].at, nowMs - 60_000);
  const lines = ["in", "out"].map((which) => [which, points(which)]);
  const most = roundUp(Math.max(...lines.flatMap(([, line]) => line.map((each) => each.rate)), 1));
  const x = (ms) => LEFT + ((ms - begin) / (nowMs - begin)) * (width - LEFT);
  const y = (number) => floor - (number / most) * (floor - TOP);
  const drawn = lines.map(([which, line]) =>
    draw("polyline", { class: which, points: line.map((each) => `${x(each.at)},${y(each.rate)}`).join(" ") }));
  const times = [[begin, "start"], [nowMs, "end"]].map(([ms, anchor]) =>
    draw("text", { x: x(ms), y: floor + 17, "text-anchor": anchor }, tick(ms, 600_000)));
  const said = (number) => (number == null ? "not known" : `${rate(number)} a second`);
  const label = `Taken in: ${said(now.in)}; left the wheel: ${said(now.out)}.`;
  return draw("svg", { role: "img", "aria-label": label, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` },
    ...grid(most, y, width), ...times, ...drawn);
}

function points(which) {
  return readings.slice(1).flatMap((each, index) => {
    const found = between(readings[index], each, which);
    return found == null ? [] : [{ at: each.at, rate: found }];
  });
}
