// Scheduled messages: search, show, cancel, reschedule, deliver now.

import { get, post, remove, Problem } from "./api.js";
import { announceErrors, confirm, detailOf, hideDetail, List, onSubmit, recordParts, show } from "./dialogs.js";
import { button, byId, focusIfLost, make } from "./dom.js";
import { asInstant, asLocal, count, counted, duration, fromNow, instant, time } from "./format.js";

const PAGE = 100;

const list = new List("found", "messages-table", "more");

let query = {}, found = [];

export function initMessages() {
  const search = byId("search");
  search.addEventListener("submit", (event) => {
    event.preventDefault();
    const { topic, key, from, to, failed } = Object.fromEntries(new FormData(search));
    begin({ topic, key, from: from && asInstant(from), to: to && asInstant(to), failed: failed && true });
  });
  onSubmit("look-up", (form) => showMessage(form.elements.id.value.trim()));
  byId("more").addEventListener("click", () => announceErrors(goOn));
}

// Lists messages that are due in an interval, or that failed, or all.
export function listMessages({ fromMs, toMs, failed }) {
  const fields = byId("search").elements;
  byId("search").reset();
  fields.from.value = fromMs ? asLocal(fromMs) : "";
  fields.to.value = toMs ? asLocal(toMs + 999) : "";
  fields.failed.checked = Boolean(failed);
  byId("messages").scrollIntoView();
  fields.topic.focus({ preventScroll: true });
  const text = (ms) => ms && new Date(ms).toISOString();
  begin({ from: text(fromMs && Math.floor(fromMs)), to: text(toMs && Math.ceil(toMs)), failed });
}

function begin(wanted) {
  query = { ...wanted, limit: PAGE };
  found = [];
  announceErrors(next);
}

async function next() {
  const asked = query;
  const page = await list.ask(get("v1/messages", asked), Boolean(asked.cursor));
  if (!page) return;
  found = [...found, ...page.messages];
  query = { ...asked, cursor: page.cursor };
  showFound(page.cursor);
}

// Moves the focus to the first new one.
async function goOn() {
  const before = found.length;
  await next();
  byId("messages-table").querySelectorAll("tbody button")[before]?.focus();
  focusIfLost("found");
}

function showFound(cursor) {
  const more = cursor ? ", and more to search" : "";
  const columns = found.some((each) => each.attempts) ? [...COLUMNS, ATTEMPTS] : COLUMNS;
  const outcome = `${counted(found.length, "message")}${more}.`;
  list.show(outcome, "Messages found", columns, found);
  byId("more").hidden = !cursor;
}

const COLUMNS = [
  { head: "Due", kind: "time", cell: (each) => time(each.due_at_ms) },
  { head: "From now", kind: "time", cell: (each) => fromNow(each.due_at_ms, Date.now()) },
  { head: "Topic", kind: "id", cell: (each) => each.topic },
  { head: "Bytes", kind: "number", cell: (each) => (each.value_bytes == null ? "no value" : count(each.value_bytes)) },
  { head: "Id", kind: "id", cell: (each) => button(each.id, () => announceErrors(() => showMessage(each.id, each.attempts ? each.due_at_ms : null)), { kind: "plain" }) },
];
const ATTEMPTS = { head: "Failed", kind: "time", cell: (each) => times(each.attempts) };

const times = (number) => (number ? counted(number, "time") : "");

const pathOf = (id) => `v1/messages/${encodeURIComponent(id)}`;

// A message that failed is found by the time of its next attempt.
async function showMessage(id, retryMs = null) {
  const message = await detailOf(get(pathOf(id), { retry_ms: retryMs }));
  if (!message) return;
  const parts = [
    ["Id", make("code", {}, message.id)],
    [message.attempts ? "Next attempt" : "Due", time(message.due_at_ms)],
    ["Failed", message.attempts ? `${times(message.attempts)}, first ${instant(message.failed_ms)}; it cannot be rescheduled` : null],
    ["Topic", message.topic],
    ["Partition", message.partition?.toString()],
    ["Cluster", message.cluster],
    ["Expires", message.expires_ms && time(message.expires_ms)],
    ["Cancelled", message.cancelled ? "yes: it will not be delivered" : null],
    ...recordParts(message),
  ];
  const changing = [
    button("Deliver now …", () => askDeliverNow(message)),
    button("Reschedule …", () => askReschedule(message)),
  ];
  const buttons = [...(message.attempts ? [] : changing), button("Cancel it …", () => askCancel(message))];
  show(message, "Message", parts, message.cancelled ? [] : buttons);
}

const named = (message) => `${message.id}, for ${message.topic}, due ${fromNow(message.due_at_ms, Date.now())}.`;

function askCancel(message) {
  confirm({
    back: "found",
    title: "Cancel this message?",
    text: `${named(message)} It will never be delivered.`,
    yes: "Cancel the message",
    act: async () => {
      await remove(pathOf(message.id));
      gone(message);
      return "Cancelled: it will not be delivered.";
    },
  });
}

function askDeliverNow(message) {
  confirm({
    back: "found",
    title: "Deliver this message now?",
    text: named(message),
    yes: "Deliver it now",
    act: async () => {
      await post(`${pathOf(message.id)}/deliver-now`);
      gone(message);
      return "It is on its way.";
    },
  });
}

function askReschedule(message) {
  const field = (text, name, more) => make("label", {}, text, make("input", { name, autocomplete: "off", ...more }));
  confirm({
    back: "found",
    title: "Give this message another time",
    text: `${named(message)} Fill in one of the two.`,
    yes: "Reschedule",
    fields: [field("In (such as 90s, 1h30m, 7d)", "in"), field("Or at, in your time", "at", { type: "datetime-local", step: "1" })],
    act: async (given) => {
      if (Boolean(given.in) === Boolean(given.at)) throw new Problem(422, "malformed", "Fill in one of the two.");
      const due = { ...(given.in && { in: given.in }), ...(given.at && { at: asInstant(given.at) }) };
      const moved = await post(`${pathOf(message.id)}/reschedule`, due);
      gone(message);
      return `It is due in ${duration(new Date(moved.due) - Date.now())} now, as ${moved.id}.`;
    },
  });
}

// The message no longer exists under its id.
function gone(message) {
  hideDetail(message);
  if (!found.length) return;
  found = found.filter((each) => each.id !== message.id);
  showFound(query.cursor);
}
