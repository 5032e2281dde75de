// Dead letters, rejected records and overdue releases: list, show and redrive.

import { get, post } from "./api.js";
import { announceErrors, confirm, detailOf, hideDetail, List, onSubmit, recordParts, show } from "./dialogs.js";
import { button, byId, make } from "./dom.js";
import { count, counted, instant, time } from "./format.js";
import { listMessages } from "./messages.js";

// The API lists the latest ones, and no more at once.
const MAX_LISTED = 1_000;

const deadList = new List("dead-letters-found", "dead-letters-table", "redrive-chosen", "redrive-all");
const rejectedList = new List("rejected-found", "rejected-table");
const overdueList = new List("overdue-found", "overdue-table");

let letters = [], filter = {};
const chosen = new Set();

export function initOutcomes() {
  onSubmit("dead-letters-search", (form) => {
    filter = filled(form);
    return listLetters();
  });
  onSubmit("rejected-search", listRejected);
  onSubmit("overdue-search", listReleases);
  byId("redrive-chosen").addEventListener("click", () => askRedrive([...chosen]));
  byId("redrive-all").addEventListener("click", () => askRedrive(letters.map((each) => each.offset)));
}

// Scrolls to a section, and submits its search.
export function openSection(name) {
  byId(name).scrollIntoView();
  const form = byId(`${name}-search`);
  form.reset();
  form.querySelector("input, button").focus({ preventScroll: true });
  form.requestSubmit();
}

const filled = (form) =>
  Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));

async function listLetters() {
  const answer = await deadList.ask(get("v1/dead-letters", { ...filter, limit: MAX_LISTED }));
  if (!answer) return;
  letters = answer.letters.reverse();
  chosen.clear();
  const all = `${counted(letters.length, "letter")} not redriven.`;
  const cut = `The latest ${all} Older ones are not listed: ask for a topic or a reason.`;
  deadList.show(letters.length < MAX_LISTED ? all : cut, "Dead letters", LETTERS, letters);
  byId("redrive-all").hidden = !letters.length;
  showChosen();
}

const offsetColumn = (open) => (
  { head: "Offset", kind: "number", cell: (each) => button(count(each.offset), () => announceErrors(() => open(each.offset)), { kind: "plain" }) }
);

const LETTERS = [
  { head: "Choose", cell: (each) => make("input", { type: "checkbox", "aria-label": `Choose ${each.offset}`, change: (event) => choose(each, event.target.checked) }) },
  offsetColumn(showLetter),
  { head: "Failed last", kind: "time", cell: (each) => time(each.last_ms) },
  { head: "Topic", kind: "id", cell: (each) => each.topic },
  { head: "Reason", cell: (each) => each.reason },
  { head: "Attempts", kind: "number", cell: (each) => count(each.attempts) },
];

function choose(letter, yes) {
  if (yes) chosen.add(letter.offset);
  else chosen.delete(letter.offset);
  showChosen();
}

function showChosen() {
  byId("redrive-chosen").hidden = !chosen.size;
  byId("redrive-chosen").textContent = `Redrive the ${count(chosen.size)} chosen …`;
}

async function showLetter(offset) {
  const letter = await detailOf(get(`v1/dead-letters/${offset}`));
  if (!letter) return;
  show(letter, `Dead letter ${count(offset)}`, [
    ["Topic", letter.topic],
    ["Partition", letter.partition?.toString()],
    ["Cluster", letter.cluster],
    ["Reason", letter.reason],
    ["Detail", letter.detail],
    ["Attempts", count(letter.attempts)],
    ["Was due", time(letter.due_ms)],
    ["Failed first", time(letter.first_ms)],
    ["Failed last", time(letter.last_ms)],
    ["Id", make("code", {}, letter.id)],
    ...recordParts(letter),
  ], [button("Redrive …", () => askRedrive([offset], letter))]);
}

function askRedrive(offsets, letter = null) {
  const many = offsets.length === 1 ? `dead letter ${count(offsets[0])}` : counted(offsets.length, "dead letter");
  confirm({
    back: "dead-letters-found",
    title: `Redrive ${many}?`,
    text: "Due now, under a new id. Each is redriven once, and fails again if the cause remains.",
    yes: "Redrive",
    act: async () => {
      const { redriven } = await post("v1/dead-letters/redrive", { offsets });
      hideDetail(letter);
      await announceErrors(listLetters);
      return `${count(redriven)} of ${count(offsets.length)} redriven.`;
    },
  });
}

async function listRejected() {
  const answer = await rejectedList.ask(get("v1/rejected", { limit: MAX_LISTED }));
  if (!answer) return;
  const records = answer.records.reverse();
  const all = records.length ? `The latest ${count(records.length)}, newest first.` : "There are none.";
  const cut = `${all} Older ones are not listed: read the topic of rejected records.`;
  rejectedList.show(records.length < MAX_LISTED ? all : cut, "Rejected records", REJECTED, records);
}

const REJECTED = [
  offsetColumn(showRejected),
  { head: "At", kind: "time", cell: (each) => time(each.at_ms) },
  { head: "Reason", cell: (each) => each.reason },
  { head: "Detail", cell: (each) => each.detail },
  { head: "Came in at", kind: "id", cell: (each) => each.source },
];

async function showRejected(offset) {
  const record = await detailOf(get(`v1/rejected/${offset}`));
  if (!record) return;
  show(record, `Rejected record ${count(offset)}`, [
    ["Reason", record.reason],
    ["Detail", record.detail],
    ["At", time(record.at_ms)],
    ["Came in at", make("code", {}, record.source)],
    ...recordParts(record),
  ], []);
}

async function listReleases() {
  const answer = await overdueList.ask(get("v1/status"));
  if (!answer) return;
  const { overdue_released: messages, overdue_releases: scans } = answer;
  overdueList.show(releases(messages, scans.length), "Overdue releases", RELEASES, scans.reverse());
}

function releases(messages, scans) {
  if (messages == null) return "It is not known: no pipeline leads, or it does not report them.";
  if (!scans) return messages ? "The scans are not known, only the number of messages." : "There are none since it leads.";
  return `${count(messages)} since it leads. The latest, newest first:`;
}

const RELEASES = [
  { head: "Found", kind: "time", cell: (each) => time(each.at_ms) },
  { head: "Messages", kind: "number", cell: (each) => count(each.messages) },
  { head: "Due from", kind: "time", cell: (each) => time(each.from_ms) },
  { head: "Due before", kind: "time", cell: (each) => time(each.to_ms) },
  { head: "Still pending", cell: listPending },
];

function listPending({ from_ms: fromMs, to_ms: toMs }) {
  const label = `List what is due from ${instant(fromMs)} to ${instant(toMs)} and still pending`;
  return button("List", () => listMessages({ fromMs, toMs }), { kind: "plain", label });
}
