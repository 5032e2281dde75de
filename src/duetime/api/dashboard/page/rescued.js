// What was past due before a window took it up: when that was found, and when it was due.

import { get } from "./api.js";
import { saying } from "./dialogs.js";
import { byId, make } from "./dom.js";
import { count, instant, time } from "./format.js";
import { List } from "./lists.js";
import { listWaiting } from "./messages.js";

const list = new List("rescued-found", "rescued-table");

export function beginRescued() {
  byId("rescued-search").addEventListener("submit", (event) => {
    event.preventDefault();
    saying(listRescues);
  });
}

async function listRescues() {
  const answer = await list.ask(get("v1/status"));
  if (!answer) return;
  const { rescued, rescues } = answer;
  list.show(sentence(rescued, rescues.length), "Rescues", RESCUES, rescues.reverse());
}

function sentence(rescued, looks) {
  if (rescued == null) return "It is not known: no pipeline leads, or it does not tell.";
  if (!looks) return rescued ? "It is not known which: only their number is told." : "There are none since it leads.";
  return `${count(rescued)} since it leads. The latest, newest first:`;
}

const RESCUES = [
  { head: "Found", kind: "time", cell: (each) => time(each.at_ms) },
  { head: "Messages", kind: "number", cell: (each) => count(each.messages) },
  { head: "Due from", kind: "time", cell: (each) => time(each.from_ms) },
  { head: "Due before", kind: "time", cell: (each) => time(each.to_ms) },
  { head: "Still waiting", cell: listStill },
];

function listStill({ from_ms: fromMs, to_ms: toMs }) {
  const what = `List what is due from ${instant(fromMs)} to ${instant(toMs)} and still waits`;
  const click = () => listWaiting({ fromMs, toMs });
  return make("button", { type: "button", class: "plain", "aria-label": what, click }, "List");
}
