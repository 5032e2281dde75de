// Questions before anything is changed, and all about one thing.

import { latest, Problem } from "./api.js";
import { byId, focusIfLost, make, say } from "./dom.js";

// Of those who asked, the last: what comes of an earlier question does not touch this one.
let last = 0;

// Asks; `act` is called with the fields' values if the answer is yes, and says what it did. What goes
// wrong is said in the dialog, which stays open then. `back` gets the keyboard if what had it is gone.
export function confirm({ title, text, yes, fields = [], act, back }) {
  const dialog = byId("question"), number = ++last;
  const isOpen = () => dialog.open && number === last;
  let busy = false;
  byId("question-title").textContent = title;
  byId("question-text").textContent = text;
  byId("question-yes").textContent = yes;
  byId("question-wrong").textContent = "";
  byId("question-fields").replaceChildren(...fields);
  dialog.querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    if (busy) return;
    busy = true;
    byId("question-wrong").textContent = "";
    say("A moment …", true);
    try {
      const done = await act(Object.fromEntries(new FormData(event.target)));
      if (isOpen()) dialog.close();
      focusIfLost(back);
      say(done);
    } catch (error) {
      say(isOpen() ? "" : sentence(error));
      if (isOpen()) byId("question-wrong").textContent = sentence(error);
    } finally {
      busy = false;
    }
  };
  byId("question-no").onclick = () => dialog.close();
  dialog.showModal();
  // What is asked for first; or the answer that changes nothing.
  (fields[0]?.querySelector("input") ?? byId("question-no")).focus();
}

// All about one thing: of those that were asked for, the last.
export const detailOf = latest();

let shown = null;

export function show(record, title, parts, buttons) {
  const dialog = byId("detail");
  shown = record;
  byId("detail-title").textContent = title;
  byId("detail-parts").replaceChildren(
    ...parts.filter(([, value]) => value != null).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );
  const close = make("button", { type: "button", click: () => dialog.close() }, "Close");
  byId("detail-buttons").replaceChildren(...buttons, close);
  if (!dialog.open) dialog.showModal();
  // It begins at its beginning, however long it is.
  close.focus({ preventScroll: true });
  dialog.scrollTop = 0;
}

// It is done with. What somebody looks at by now, if that is something else, stays.
export function hideDetail(record) {
  if (shown?.id === record?.id && shown?.number === record?.number) byId("detail").close();
}

// The parts of a record, as the API tells them.
export function recordParts(record) {
  const payload = (part, name) => {
    if (part[`${name}_base64`] != null) return make("pre", {}, `base64: ${part[`${name}_base64`]}`);
    return part[name] == null ? "none" : make("pre", {}, part[name]);
  };
  const headers = record.headers.map((each) => make("div", {}, make("code", {}, each.name), " ", payload(each, "value")));
  return [
    ["Key", payload(record, "key")],
    ["Headers", headers.length ? make("div", {}, ...headers) : "none"],
    ["Value", payload(record, "value")],
  ];
}

// Does it, and says what goes wrong.
export async function saying(act) {
  try {
    return await act();
  } catch (error) {
    say(sentence(error));
    return undefined;
  }
}

export function sentence(error) {
  if (error instanceof Problem) return error.message;
  console.error(error);
  return "This page has a fault: see the browser's console.";
}
