// The page as a whole: its tiles, its live part, and its searches and lists.

import { follow, initToken } from "./api.js";
import { button, byId, make } from "./dom.js";
import { count, duration, instant, rate } from "./format.js";
import { initMessages, listMessages } from "./messages.js";
import { initOutcomes, openSection } from "./outcomes.js";
import { initPending, showPending } from "./pending.js";
import { initSchedules } from "./schedules.js";
import { showThroughput } from "./throughput.js";

// Each tile: its name; from a snapshot a value, a note, and whether it is bad; and the key of the
// action that lists the messages behind it, if there is one.
const TILES = [
  ["Leader", ({ status, at_ms }) => ({
    words: true,
    value: status.leader ?? "none",
    note: status.leader ? (status.since_ms ? `for ${duration(at_ms - status.since_ms)}` : "") : "nothing is delivered",
    bad: !status.leader,
  })],
  ["Standbys", ({ status }) => ({ value: count(status.standbys.length), note: status.standbys.join(", ") })],
  ["Pending", ({ status }) => (status.waiting == null ? NO_STORE : { value: count(status.waiting), note: "in the store" }), "pending"],
  ["Late", ({ status }) => (status.late == null ? NO_STORE : {
    value: count(status.late),
    note: status.late ? `the oldest by ${duration(status.lag_ms)}` : "nothing",
    bad: status.late > 0,
  }), "late"],
  ["Taken in", ({ totals }, rates) => perSecond(rates.in, totals.taken_in)],
  ["Left the wheel", ({ totals }, rates) => perSecond(rates.out, totals.released)],
  ["Rejected", ({ totals }) => total(totals.rejected), "rejected"],
  ["Failed attempts", ({ totals }) => ({ ...total(totals.failed), note: "so far; to be retried:" }), "failed"],
  ["Overdue releases", ({ status }) => (status.overdue_released == null ? notReported(status) : {
    value: count(status.overdue_released),
    note: "past due when released, since it leads",
  }), "overdue"],
  ["Dead letters", ({ totals }) => total(totals.dead), "deadLetters"],
  ["Queries", ({ status }) => queries(status)],
  ["Spooled", ({ spooled }) => (spooled == null ? { ...UNKNOWN, note: "the file cannot be read", bad: true } : {
    value: count(spooled),
    note: spooled ? "accepted, and not in Kafka" : "on this API's disk",
    bad: spooled > 0,
  })],
];

const unknown = (note) => ({ value: "not known", words: true, note });
const UNKNOWN = unknown("Kafka's offsets do not tell");
const NO_STORE = { ...unknown("the store does not answer"), bad: true };
const notReported = (status) => unknown(status.leader ? "the leader does not report it" : "no pipeline leads");

function queries(status) {
  const { queries: found } = status;
  const names = Object.keys(found), failing = names.filter((name) => found[name] !== "runs");
  if (!names.length) return notReported(status);
  return {
    words: true,
    value: failing.length ? `${count(failing.length)} of ${count(names.length)} fail` : `all ${count(names.length)} run`,
    note: failing.map((name) => `${name} ${found[name]}`).join("; ") || names.join(", "),
    bad: failing.length > 0,
  };
}

function perSecond(now, sum) {
  if (sum == null) return UNKNOWN;
  return { value: now == null ? "…" : `${rate(now)}/s`, note: `${count(sum)} so far` };
}

const total = (number) => (number == null ? UNKNOWN : { value: count(number), note: "so far" });

const shown = new Map();

// `lists` has an action for each key in TILES.
function initTiles(lists) {
  for (const [name, , list] of TILES) {
    const value = make("div", { class: "value" }, "…");
    const note = make("span");
    const more = list ? [" ", link(name, lists[list])] : [];
    const content = make("dd", {}, value, make("div", { class: "about" }, note, ...more));
    const tile = make("div", { class: "tile" }, make("dt", {}, name), content);
    shown.set(name, { tile, value, note });
    byId("tiles").append(tile);
  }
}

function showTiles(snapshot, rates) {
  for (const [name, of] of TILES) showTile(name, of(snapshot, rates));
}

// Shows what the API knows while Kafka does not answer.
function showSpooled(spooled) {
  const [name, of] = TILES.at(-1);
  showTile(name, of({ spooled }));
}

function showTile(name, content) {
  const { tile, value, note } = shown.get(name);
  value.textContent = content.value;
  value.classList.toggle("words", Boolean(content.words));
  tile.dataset.state = content.bad ? "bad" : "good";
  note.textContent = content.note;
}

const link = (name, list) => button("List them", list, { kind: "plain", label: `List them: ${name}` });

// Shows the state of the connection, and whether the rest of the page is old.
function showConnection(state, text, stale = state !== "live") {
  const connection = byId("connection");
  connection.dataset.state = state;
  // A screen reader reads every change aloud.
  if (connection.textContent !== text) connection.textContent = text;
  document.body.classList.toggle("stale", stale);
}

const asOf = (ms) => (ms ? ` The page is of ${instant(ms)}.` : "");

let lastMs = 0;

initToken();
initTiles({
  pending: () => listMessages({}),
  // Before the first snapshot, the browser's clock has to do.
  late: () => listMessages({ toMs: lastMs || Date.now() }),
  failed: () => listMessages({ failed: true }),
  rejected: () => openSection("rejected"),
  overdue: () => openSection("overdue"),
  deadLetters: () => openSection("dead-letters"),
});
initPending((fromMs, toMs) => listMessages({ fromMs, toMs }));
initMessages();
initSchedules();
initOutcomes();

follow({
  snapshot(snapshot) {
    lastMs = snapshot.at_ms;
    if (snapshot.store_error) showConnection("problem", snapshot.store_error, false);
    else showConnection("live", "Live");
    showTiles(snapshot, showThroughput(snapshot));
    showPending(snapshot);
  },
  problem({ problem, spooled }) {
    showSpooled(spooled);
    showConnection("problem", `${problem.detail}${asOf(lastMs)}`);
  },
  lost() {
    showConnection("lost", `The connection is lost; trying again.${asOf(lastMs)}`);
  },
});
