// What was not delivered: dead letters, to be brought back, and rejected records.

import { get, post } from "./api.js";
import { confirm, detailOf, hideDetail, recordParts, saying, show } from "./dialogs.js";
import { button, byId, make } from "./dom.js";
import { count, time } from "./format.js";
import { List } from "./lists.js";

// The API gives no more at once, and no others than the latest.
const MOST = 1_000;

const deadList = new List("dead-found", "dead-table", "redrive-chosen", "redrive-all");
const rejectedList = new List("rejected-found", "rejected-table");

let letters = [], wanted = {};
const chosen = new Set();

export function beginDead() {
  byId("dead-search").addEventListener("submit", (event) => {
    event.preventDefault();
    wanted = given(event.target);
    saying(listLetters);
  });
  byId("rejected-search").addEventListener("submit", (event) => {
    event.preventDefault();
    saying(listRejected);
  });
  byId("redrive-chosen").addEventListener("click", () => askRedrive([...chosen]));
  byId("redrive-all").addEventListener("click", () => askRedrive(letters.map((each) => each.number)));
}

// Goes to one of the two, and lists what is there.
export function openSection(name) {
  byId(name).scrollIntoView();
  const form = byId(`${name}-search`);
  form.reset();
  form.querySelector("input, button").focus({ preventScroll: true });
  form.requestSubmit();
}

const given = (form) =>
  Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));

async function listLetters() {
  const answer = await deadList.ask(get("v1/dead", { ...wanted, limit: MOST }));
  if (!answer) return;
  letters = answer.letters.reverse();
  chosen.clear();
  const all = `${count(letters.length)} ${letters.length === 1 ? "letter" : "letters"} not brought back.`;
  const cut = `The latest ${all} Older ones are not listed: ask for a topic or a reason.`;
  deadList.show(letters.length < MOST ? all : cut, "Dead letters", LETTERS, letters);
  byId("redrive-all").hidden = !letters.length;
  showChosen();
}

const LETTERS = [
  { head: "Choose", cell: (each) => make("input", { type: "checkbox", "aria-label": `Choose ${each.number}`, change: (event) => choose(each, event.target.checked) }) },
  { head: "Number", kind: "number", cell: (each) => button(count(each.number), () => saying(() => showLetter(each.number)), "plain") },
  { head: "Died", kind: "time", cell: (each) => time(each.last_ms) },
  { head: "Topic", kind: "id", cell: (each) => each.topic },
  { head: "Reason", cell: (each) => each.reason },
  { head: "Attempts", kind: "number", cell: (each) => count(each.attempts) },
];

function choose(letter, yes) {
  if (yes) chosen.add(letter.number);
  else chosen.delete(letter.number);
  showChosen();
}

function showChosen() {
  byId("redrive-chosen").hidden = !chosen.size;
  byId("redrive-chosen").textContent = `Redrive the ${count(chosen.size)} chosen …`;
}

async function showLetter(number) {
  const letter = await detailOf(get(`v1/dead/${number}`));
  if (!letter) return;
  show(letter, `Dead letter ${count(number)}`, [
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
  ], [button("Redrive …", () => askRedrive([number], letter))]);
}

function askRedrive(numbers, letter = null) {
  const many = numbers.length === 1 ? `dead letter ${count(numbers[0])}` : `${count(numbers.length)} dead letters`;
  confirm({
    back: "dead-found",
    title: `Send ${many} once more?`,
    text: "Due now, under a new id. Each is brought back once, and dies again if the cause is still there.",
    yes: "Redrive",
    act: async () => {
      const { redriven } = await post("v1/dead/redrive", { numbers });
      hideDetail(letter);
      await saying(listLetters);
      return `${count(redriven)} of ${count(numbers.length)} sent once more.`;
    },
  });
}

async function listRejected() {
  const answer = await rejectedList.ask(get("v1/rejected", { limit: MOST }));
  if (!answer) return;
  const records = answer.records.reverse();
  const all = records.length ? `The latest ${count(records.length)}, newest first.` : "There are none.";
  const cut = `${all} Older ones are not listed: read the topic of rejected records.`;
  rejectedList.show(records.length < MOST ? all : cut, "Rejected records", REJECTED, records);
}

const REJECTED = [
  { head: "Number", kind: "number", cell: (each) => button(count(each.number), () => saying(() => showRejected(each.number)), "plain") },
  { head: "At", kind: "time", cell: (each) => time(each.at_ms) },
  { head: "Reason", cell: (each) => each.reason },
  { head: "Detail", cell: (each) => each.detail },
  { head: "Came in at", kind: "id", cell: (each) => each.source },
];

async function showRejected(number) {
  const record = await detailOf(get(`v1/rejected/${number}`));
  if (!record) return;
  show(record, `Rejected record ${count(number)}`, [
    ["Reason", record.reason],
    ["Detail", record.detail],
    ["At", time(record.at_ms)],
    ["Came in at", make("code", {}, record.source)],
    ...recordParts(record),
  ], []);
}
