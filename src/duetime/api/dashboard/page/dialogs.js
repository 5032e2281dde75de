// Questions before anything is changed, and all about one thing.

import { Problem } from "./api.js";
import { byId, make, say } from "./dom.js";

// Asks; `act` is called with the fields' values if the answer is yes. What goes wrong is said in
// the dialog, which stays open then.
export function confirm({ title, text, yes, fields = [], act }) {
  const dialog = byId("question");
  byId("question-title").textContent = title;
  byId("question-text").textContent = text;
  byId("question-yes").textContent = yes;
  byId("question-wrong").textContent = "";
  byId("question-fields").replaceChildren(...fields);
  dialog.querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    byId("question-yes").disabled = true;
    try {
      const done = await act(given);
      dialog.close();
      say(done);
    } catch (error) {
      byId("question-wrong").textContent = sentence(error);
    } finally {
      byId("question-yes").disabled = false;
    }
  };
  byId("question-no").onclick = () => dialog.close();
  dialog.showModal();
  // What is asked for first; or the answer that changes nothing.
  (fields[0]?.querySelector("input") ?? byId("question-no")).focus();
}

export function show(title, parts, buttons) {
  const dialog = byId("detail");
  byId("detail-title").textContent = title;
  byId("detail-parts").replaceChildren(
    ...parts.filter(([, value]) => value != null).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]),
  );
  const close = make("button", { type: "button", click: () => dialog.close() }, "Close");
  byId("detail-buttons").replaceChildren(...buttons, close);
  if (!dialog.open) dialog.showModal();
  close.focus();
}

export const hideDetail = () => byId("detail").close();

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
