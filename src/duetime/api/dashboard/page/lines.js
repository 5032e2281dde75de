// Readings over the last ten minutes, as lines.

import { roundUp } from "./bins.js";
import { byId, draw } from "./dom.js";
import { tick } from "./format.js";
import { grid } from "./waiting.js";

export const KEPT_MS = 600_000;
const HEIGHT = 150, TOP = 8, BOTTOM = 22, LEFT = 44;

// `lines` are [class, [{ at, value }, ...]], drawn up to now; `label` says the same in words.
export function showLines(id, nowMs, lines, label) {
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
