// How things are now: who leads, what is late, how many of what.

import { byId, make } from "./dom.js";
import { count, duration, instant, rate } from "./format.js";

// Each tile: what it is called, and of a look: a value, words about it, whether it is bad; and what
// lists the messages that it counts, where something can.
const TILES = [
  ["Leader", ({ status, at_ms }) => ({
    words: true,
    value: status.leader ?? "none",
    about: status.leader ? (status.since_ms ? `for ${duration(at_ms - status.since_ms)}` : "") : "nothing is delivered",
    bad: !status.leader,
  })],
  ["Standing by", ({ status }) => ({ value: count(status.standbys.length), about: status.standbys.join(", ") })],
  ["Waiting", ({ status }) => (status.waiting == null ? NO_STORE : { value: count(status.waiting), about: "in the store" }), "waiting"],
  ["Late", ({ status }) => (status.late == null ? NO_STORE : {
    value: count(status.late),
    about: status.late ? `the oldest by ${duration(status.lag_ms)}` : "nothing",
    bad: status.late > 0,
  }), "late"],
  ["Lateness", ({ status, lateness }) => (status.leader ? late(lateness) : NOBODY)],
  ["Taken in", ({ totals }, rates) => perSecond(rates.in, totals.taken_in)],
  ["Left the wheel", ({ totals }, rates) => perSecond(rates.out, totals.released)],
  ["Rejected", ({ totals }) => sum(totals.rejected), "rejected"],
  ["Failed attempts", ({ totals }) => ({ ...sum(totals.failed), about: "so far; tried again:" }), "failed"],
  ["Rescued", ({ status }) => (status.rescued == null ? untold(status) : {
    value: count(status.rescued),
    about: "past due when taken up, since it leads",
  }), "rescued"],
  ["Dead letters", ({ totals }) => sum(totals.dead), "dead"],
  ["Queries", ({ status }) => queries(status)],
  ["Spooled", ({ spooled }) => (spooled == null ? { ...UNKNOWN, about: "the file cannot be read", bad: true } : {
    value: count(spooled),
    about: spooled ? "accepted, and not in Kafka yet" : "on this API's disk",
    bad: spooled > 0,
  })],
];

const unknown = (about) => ({ value: "not known", words: true, about });
const UNKNOWN = unknown("Kafka's offsets do not tell");
const NO_STORE = { ...unknown("the store does not answer"), bad: true };
const NOBODY = unknown("no pipeline leads");
const untold = (status) => (status.leader ? unknown("the leader does not tell") : NOBODY);

// An own message that has not come for so long has met trouble, in ms.
const MISSED_MS = 10_000;

function late(found) {
  if (!found) return unknown("its own messages cannot be sent or read");
  if (!found.samples && found.overdue_ms <= MISSED_MS) return { value: "…", about: "its own messages will tell in some seconds" };
  if (found.overdue_ms > MISSED_MS) {
    return { value: `${duration(found.overdue_ms)}`, about: "an own message is due for so long", bad: true };
  }
  return { value: `${count(found.p99_ms)} ms`, about: `p99; median ${count(found.p50_ms)}, most ${count(found.max_ms)} ms` };
}

function queries(status) {
  const { queries: found } = status;
  const names = Object.keys(found), troubled = names.filter((name) => found[name] !== "runs");
  if (!names.length) return untold(status);
  return {
    words: true,
    value: troubled.length ? `${count(troubled.length)} of ${count(names.length)} in trouble` : `all ${count(names.length)} run`,
    about: troubled.map((name) => `${name} ${found[name]}`).join("; ") || names.join(", "),
    bad: troubled.length > 0,
  };
}

function perSecond(now, total) {
  if (total == null) return UNKNOWN;
  return { value: now == null ? "…" : `${rate(now)}/s`, about: `${count(total)} so far` };
}

const sum = (number) => (number == null ? UNKNOWN : { value: count(number), about: "so far" });

const shown = new Map();

// `lists` has by name what to do when somebody wants to see what a tile counts.
export function beginTiles(lists) {
  for (const [name, , list] of TILES) {
    const value = make("div", { class: "value" }, "…");
    const about = make("span");
    const more = list ? [" ", link(name, lists[list])] : [];
    const said = make("dd", {}, value, make("div", { class: "about" }, about, ...more));
    const tile = make("div", { class: "tile" }, make("dt", {}, name), said);
    shown.set(name, { tile, value, about });
    byId("tiles").append(tile);
  }
}

export function showTiles(look, rates) {
  for (const [name, of] of TILES) showTile(name, of(look, rates));
}

// What is known of the API itself while Kafka does not answer.
export function showSpooled(spooled) {
  const [name, of] = TILES.at(-1);
  showTile(name, of({ spooled }));
}

function showTile(name, said) {
  const { tile, value, about } = shown.get(name);
  value.textContent = said.value;
  value.classList.toggle("words", Boolean(said.words));
  tile.dataset.state = said.bad ? "bad" : "good";
  about.textContent = said.about;
}

const link = (name, list) => make("button", { type: "button", class: "plain", click: list, "aria-label": `List them: ${name}` }, "List them");

// How the connection is: `state` for the eye, the text for everybody; and whether what is seen is old.
export function showConnection(state, text, stale = state !== "live") {
  const shownNow = byId("connection");
  shownNow.dataset.state = state;
  // Only what is new is read aloud.
  if (shownNow.textContent !== text) shownNow.textContent = text;
  document.body.classList.toggle("stale", stale);
}

export const asOf = (ms) => (ms ? ` What you see is of ${instant(ms)}.` : "");
