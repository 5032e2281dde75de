// Pending records over time, from the next minute to years.

import { ChartTable, grid, LEFT, roundUp } from "./charts.js";
import { button, byId, draw, make } from "./dom.js";
import { count, instant, tick } from "./format.js";

const MINUTE = 60_000, HOUR = 60 * MINUTE, DAY = 24 * HOUR, YEAR = 365.25 * DAY;
const ZOOMS = [
  ["minute", MINUTE], ["10 minutes", 10 * MINUTE], ["hour", HOUR], ["6 hours", 6 * HOUR], ["day", DAY],
  ["week", 7 * DAY], ["month", 30 * DAY], ["year", YEAR], ["5 years", 5 * YEAR], ["all", null],
];
const HEIGHT = 190, TOP = 8, BOTTOM = 22;

let snapshot = null, zoom = "hour", here = null, drawn = null, choose, table;

// `chosen` is called with the start and the end of a bar.
export function initPending(chosen) {
  choose = chosen;
  table = new ChartTable("pending-table", "Pending records", COLUMNS);
  for (const [name] of ZOOMS) {
    const change = () => { zoom = name; here = null; show(); };
    const radio = make("input", { type: "radio", name: "zoom", value: name, checked: name === zoom, change });
    byId("zoom").append(make("label", {}, radio, make("span", {}, name)));
  }
  new ResizeObserver(() => show()).observe(byId("pending"));
  // On the container: bars are drawn again while one is pressed.
  const container = byId("pending");
  container.addEventListener("pointermove", (event) => point(indexAt(event)));
  container.addEventListener("pointerleave", () => point(null));
  container.addEventListener("click", (event) => {
    const bar = drawn?.found.bars[indexAt(event)];
    if (bar) choose(bar.from, bar.to);
  });
}

export function showPending(latest) {
  snapshot = latest.pending ? latest : null;
  if (snapshot) show();
  else showUnknown();
}

function showUnknown() {
  drawn = here = null;
  byId("pending").replaceChildren();
  byId("pending-readout").textContent = "Not known: the store does not answer.";
  table.show([]);
}

function indexAt({ clientX }) {
  if (!drawn) return null;
  const { left, width } = byId("pending").getBoundingClientRect();
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
  if (!snapshot) return;
  const { slots } = snapshot.pending;
  const widthMs = ZOOMS.find(([name]) => name === zoom)[1] ?? reach(slots, snapshot.at_ms);
  const width = Math.max(280, byId("pending").clientWidth);
  drawn = { found: bins(slots, snapshot.at_ms, widthMs), widthMs, width, step: (width - LEFT) / BARS };
  redraw();
  table.show(drawn.found.bars.filter(total));
}

function redraw() {
  byId("pending").replaceChildren(chart(drawn));
  showReadout(drawn.found);
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
  // A single message is visible, too.
  const part = (kind, from, to) => {
    const height = Math.max(1.5, y(from) - y(to));
    return draw("rect", { class: kind, x, width: wide, y: y(from) - height, height });
  };
  return [
    ...(bar.exact ? [part("exact", 0, bar.exact)] : []),
    ...(bar.spread ? [part("spread", bar.exact, total(bar))] : []),
  ];
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
  return `${count(Math.round(sum))} records are pending ${within}${later}.`;
}

function showReadout({ bars, beyond }) {
  const bar = bars[here];
  byId("pending-readout").textContent = bar
    ? `${instant(bar.from)} to ${instant(bar.to)}: ${about(bar)}. Click to list them.`
    : summary(bars, beyond);
}

const COLUMNS = [
  { head: "From", kind: "time", cell: (bar) => instant(bar.from) },
  { head: "To", kind: "time", cell: (bar) => instant(bar.to) },
  { head: "Records", kind: "number", cell: about },
  { head: "Messages", cell: (bar) => button("List", () => choose(bar.from, bar.to)) },
];

// From here on, arithmetic only.

const BARS = 60;

// Bars from `nowMs` on. A slot that fits into a bar counts there; a wider one is spread evenly over
// the bars that it covers, because its messages may be anywhere in it.
export function bins(slots, nowMs, widthMs, bars = BARS) {
  const barMs = widthMs / bars;
  const found = Array.from({ length: bars }, (_, index) => ({
    from: nowMs + index * barMs,
    to: nowMs + (index + 1) * barMs,
    exact: 0,
    spread: 0,
  }));
  let beyond = 0;
  for (const slot of slots) {
    const from = Math.max(slot.from_ms, nowMs);
    if (slot.to_ms <= nowMs) continue;
    const perMs = slot.count / (slot.to_ms - from);
    beyond += perMs * Math.max(0, slot.to_ms - Math.max(from, nowMs + widthMs));
    const first = Math.max(0, Math.floor((from - nowMs) / barMs));
    const last = Math.min(bars - 1, Math.ceil((slot.to_ms - nowMs) / barMs) - 1);
    for (let index = first; index <= last; index += 1) {
      const bar = found[index];
      const share = perMs * (Math.min(slot.to_ms, bar.to) - Math.max(from, bar.from));
      // A narrow slot that touches a second bar counts as exact in both.
      if (slot.to_ms - from <= barMs) bar.exact += share;
      else bar.spread += share;
    }
  }
  return { bars: found, beyond };
}

const total = (bar) => bar.exact + bar.spread;

// The time until the last slot ends.
const reach = (slots, nowMs) => Math.max(MINUTE, ...slots.map((each) => each.to_ms - nowMs));
