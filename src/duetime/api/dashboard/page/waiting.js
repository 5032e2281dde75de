// What waits, drawn over time, from the next minute to years.

import { BARS, bins, reach, roundUp, total } from "./bins.js";
import { button, byId, draw, make } from "./dom.js";
import { compact, count, instant, tick } from "./format.js";
import { Tabled } from "./tabled.js";

const MINUTE = 60_000, HOUR = 60 * MINUTE, DAY = 24 * HOUR, YEAR = 365.25 * DAY;
const ZOOMS = [
  ["minute", MINUTE], ["10 minutes", 10 * MINUTE], ["hour", HOUR], ["6 hours", 6 * HOUR], ["day", DAY],
  ["week", 7 * DAY], ["month", 30 * DAY], ["year", YEAR], ["5 years", 5 * YEAR], ["all", null],
];
const HEIGHT = 190, TOP = 8, BOTTOM = 22, LEFT = 44;

let look = null, zoom = "hour", here = null, drawn = null, choose, tabled;

// `chosen` is called with the two instants of a bar.
export function beginWaiting(chosen) {
  choose = chosen;
  tabled = new Tabled("waiting-table", "What waits", COLUMNS);
  for (const [name] of ZOOMS) {
    const change = () => { zoom = name; here = null; show(); };
    const radio = make("input", { type: "radio", name: "zoom", value: name, checked: name === zoom, change });
    byId("zoom").append(make("label", {}, radio, make("span", {}, name)));
  }
  new ResizeObserver(() => show()).observe(byId("waiting"));
  // At what stays: bars are drawn anew while somebody presses one.
  const there = byId("waiting");
  there.addEventListener("pointermove", (event) => point(indexAt(event)));
  there.addEventListener("pointerleave", () => point(null));
  there.addEventListener("click", (event) => {
    const bar = drawn?.found.bars[indexAt(event)];
    if (bar) choose(bar.from, bar.to);
  });
}

export function showWaiting(seen) {
  look = seen.pending ? seen : null;
  if (look) show();
  else showUnknown();
}

function showUnknown() {
  drawn = here = null;
  byId("waiting").replaceChildren();
  byId("waiting-readout").textContent = "It is not known: the store does not answer.";
  tabled.show([]);
}

function indexAt({ clientX }) {
  if (!drawn) return null;
  const { left, width } = byId("waiting").getBoundingClientRect();
  const x = ((clientX - left) / width) * drawn.width;
  const index = Math.floor((x - LEFT) / drawn.step);
  return index in drawn.found.bars ? index : null;
}

function point(index) {
  if (index === here) return;
  here = index;
  redraw();
}

function show() {
  if (!look) return;
  const { slots } = look.pending;
  const widthMs = ZOOMS.find(([name]) => name === zoom)[1] ?? reach(slots, look.at_ms);
  const width = Math.max(280, byId("waiting").clientWidth);
  drawn = { found: bins(slots, look.at_ms, widthMs), widthMs, width, step: (width - LEFT) / BARS };
  redraw();
  tabled.show(drawn.found.bars.filter(total));
}

function redraw() {
  byId("waiting").replaceChildren(chart(drawn));
  tell(drawn.found);
}

function chart({ found: { bars, beyond }, widthMs, width, step }) {
  const floor = HEIGHT - BOTTOM;
  const most = roundUp(Math.max(...bars.map(total)));
  const y = (number) => floor - (number / most) * (floor - TOP);
  const columns = bars.flatMap((bar, index) => column(bar, LEFT + index * step, step, y));
  const mark = { class: "here", x: LEFT + here * step, y: TOP, width: step, height: floor - TOP };
  const label = summary(bars, beyond);
  return draw("svg", { role: "img", "aria-label": label, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` },
    ...grid(most, y, width), ...times(bars, widthMs, width, floor), ...columns,
    ...(here == null ? [] : [draw("rect", mark)]));
}

function column(bar, x, step, y) {
  const wide = Math.max(1, step - 1.5);
  // A single message is seen, too.
  const part = (kind, from, to) => {
    const height = Math.max(1.5, y(from) - y(to));
    return draw("rect", { class: kind, x, width: wide, y: y(from) - height, height });
  };
  return [
    ...(bar.exact ? [part("exact", 0, bar.exact)] : []),
    ...(bar.spread ? [part("spread", bar.exact, total(bar))] : []),
  ];
}

export function grid(most, y, width) {
  return [0, most / 2, most].flatMap((each) => [
    draw("line", { class: "grid", x1: LEFT, x2: width, y1: y(each), y2: y(each) }),
    draw("text", { x: LEFT - 6, y: y(each) + 4, "text-anchor": "end" }, compact(each)),
  ]);
}

function times(bars, widthMs, width, floor) {
  const marks = width < 560 ? 3 : 6;
  const from = bars[0].from;
  return Array.from({ length: marks + 1 }, (_, index) => draw("text", {
    x: LEFT + (index / marks) * (width - LEFT), y: floor + 17,
    "text-anchor": index === 0 ? "start" : index === marks ? "end" : "middle",
  }, tick(from + (index / marks) * widthMs, widthMs)));
}

const about = (bar) => `${bar.spread ? "about " : ""}${count(Math.round(total(bar)))}`;

function summary(bars, beyond) {
  const sum = bars.reduce((all, bar) => all + total(bar), 0);
  const within = zoom === "all" ? "at all" : `within the next ${zoom}`;
  const later = beyond >= 0.5 ? `, and about ${count(Math.round(beyond))} later` : "";
  return `${count(Math.round(sum))} records wait ${within}${later}.`;
}

function tell({ bars, beyond }) {
  const bar = bars[here];
  byId("waiting-readout").textContent = bar
    ? `${instant(bar.from)} to ${instant(bar.to)}: ${about(bar)}. Click to list them.`
    : summary(bars, beyond);
}

const COLUMNS = [
  { head: "From", kind: "time", cell: (bar) => instant(bar.from) },
  { head: "To", kind: "time", cell: (bar) => instant(bar.to) },
  { head: "Records", kind: "number", cell: about },
  { head: "Messages", cell: (bar) => button("List", () => choose(bar.from, bar.to)) },
];
