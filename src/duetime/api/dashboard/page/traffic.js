// Throughput since the page is open, from counts of records that were ever appended.

import { rate, tick } from "./format.js";
import { KEPT_MS, showLines } from "./lines.js";
import { Tabled } from "./tabled.js";

// A tile says the average of so long.
const SMOOTH_MS = 10_000;

const said = (number) => (number == null ? "not known" : rate(number));
const COLUMNS = [
  { head: "At", kind: "time", cell: (each) => tick(each.at, KEPT_MS) },
  { head: "Taken in, a second", kind: "number", cell: (each) => said(each.in) },
  { head: "Left the wheel, a second", kind: "number", cell: (each) => said(each.out) },
];
const tabled = new Tabled("traffic-table", "Throughput", COLUMNS);

let readings = [];

// Notes a look, draws, and returns the present rates; null where they are not known yet.
export function showTraffic(look) {
  const { taken_in: taken, released } = look.totals;
  const reading = { at: look.at_ms, since: look.since_ms, in: taken, out: released };
  readings = [...readings.filter((each) => isOfThese(each, reading)), reading];
  const now = { in: lately("in"), out: lately("out") };
  showLines("traffic", look.at_ms, ["in", "out"].map((which) => [which, points(which)]),
    `Records a second: taken in ${said(now.in)}; left the wheel ${said(now.out)}.`);
  tabled.show(rates().toReversed());
  return now;
}

// Another process of the API counts from another beginning: no difference of the two is a rate.
const isOfThese = (each, { at, since }) => each.since === since && each.at > at - KEPT_MS;

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

const rates = () => readings.slice(1).map((each, index) => {
  const rateOf = (which) => between(readings[index], each, which);
  return { at: each.at, in: rateOf("in"), out: rateOf("out") };
});

const points = (which) =>
  rates().filter((each) => each[which] != null).map((each) => ({ at: each.at, value: each[which] }));

