// Questions before a change, details of one record, and lists of results.

import { latest, Problem } from "./api.js";
import { announce, button, byId, focusIfLost, make, table } from "./dom.js";

// The number of the last question: the result of an earlier one does not touch the dialog.
let last = 0;

// Asks a question. `act` is called with the values of the fields if the answer is yes, and returns
// what it did. Its error is shown in the dialog, which stays open. `back` gets a lost focus.
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
    announce("A moment …", true);
    try {
      const done = await act(Object.fromEntries(new FormData(event.target)));
      if (isOpen()) dialog.close();
      focusIfLost(back);
      announce(done);
    } catch (error) {
      announce(isOpen() ? "" : sentence(error));
      if (isOpen()) byId("question-wrong").textContent = sentence(error);
    } finally {
      busy = false;
    }
  };
  byId("question-no").onclick = () => dialog.close();
  dialog.showModal();
  // The first field; or the answer that changes nothing.
  (fields[0]?.querySelector("input") ?? byId("question-no")).focus();
}

// The details that were requested last.
export const detailOf = latest();

let shown = null;

export function show(record, title, parts, buttons) {
  const dialog = byId("detail");
  shown = record;
  byId("detail-title").textContent = title;
  byId("detail-parts").replaceChildren(
    ...parts.filter(([, value]) => value != null).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );
  const close = button("Close", () => dialog.close());
  byId("detail-buttons").replaceChildren(...buttons, close);
  if (!dialog.open) dialog.showModal();
  // It starts at the top, however long it is.
  close.focus({ preventScroll: true });
  dialog.scrollTop = 0;
}

// Closes the dialog, unless it shows another record by now.
export function hideDetail(record) {
  if (shown?.id === record?.id && shown?.offset === record?.offset) byId("detail").close();
}

// The parts of a record.
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

// Calls `act`, and announces its error.
export async function announceErrors(act) {
  try {
    return await act();
  } catch (error) {
    announce(sentence(error));
    return undefined;
  }
}

// Calls `act` with the form when it is submitted.
export function onSubmit(id, act) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    announceErrors(() => act(event.target));
  });
}

export function sentence(error) {
  if (error instanceof Problem) return error.message;
  console.error(error);
  return "This page has a fault: see the browser's console.";
}

// A list of search results: that of the last search is shown, in whatever order answers come.
export class List {
  #latest = latest();
  #line;
  #table;
  #parts;

  // The ids of the line with the outcome, of the table, and of other elements about the result.
  constructor(line, table, ...more) {
    this.#line = line;
    this.#table = table;
    this.#parts = [table, ...more];
  }

  // Returns the answer; undefined if there was another search since. After an error, the result of
  // another search is hidden, unless this one `continues` it.
  async ask(asked, continues = false) {
    byId(this.#line).textContent = "Searching …";
    try {
      return await this.#latest(asked);
    } catch (error) {
      byId(this.#line).textContent = sentence(error);
      if (!continues) for (const part of this.#parts) byId(part).hidden = true;
      throw error;
    }
  }

  show(outcome, caption, columns, rows) {
    byId(this.#line).textContent = outcome;
    byId(this.#table).hidden = !rows.length;
    byId(this.#table).replaceChildren(table(caption, columns, rows));
  }
}
