// Elements from names, attributes and text. Text is never parsed as markup.

export const byId = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A table; each column has a heading, and a function from a row to the content of a cell.
export function table(caption, columns, rows) {
  const heads = columns.map((each) => make("th", { scope: "col", class: each.kind }, each.head));
  const lines = rows.map((row) =>
    make("tr", {}, ...columns.map((each) => make("td", { class: each.kind }, each.cell(row)))),
  );
  return make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines));
}

// A button; `kind` is its class, and `label` the text for screen readers, if that is another one.
export function button(text, act, { kind, label } = {}) {
  return make("button", { type: "button", class: kind, "aria-label": label, click: act }, text);
}

// Moves the focus here, if its element is gone: the keyboard would start at the top of the page.
export function focusIfLost(id) {
  const has = document.activeElement ?? document.body;
  if (has === document.body || !has.checkVisibility()) byId(id).focus({ preventScroll: true });
}

// A screen reader reads changes of an element that it knows, and not the text of a new one.
const NOTICED_MS = 100;
const SHOWN_MS = 10_000;

// Shows a sentence, which is read aloud, too; with `stays`, until the next one.
let next;
export function announce(text, stays = false) {
  clearTimeout(next);
  const line = byId("announcement");
  line.textContent = "";
  placeAnnouncement();
  next = setTimeout(() => {
    line.textContent = text;
    if (!stays) next = setTimeout(() => { line.textContent = ""; }, SHOWN_MS);
  }, NOTICED_MS);
}

// Moves it into the open dialog, which would hide it otherwise.
function placeAnnouncement() {
  const place = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  if (byId("announcement").parentElement !== place) place.append(byId("announcement"));
}
document.addEventListener("close", placeAnnouncement, true);
