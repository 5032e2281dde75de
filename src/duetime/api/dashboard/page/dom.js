// Elements, made of names, attributes and text. Text is never read as markup.

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

// A table: each column is a heading and what makes a cell's content of a row.
export function table(caption, columns, rows) {
  const heads = columns.map((each) => make("th", { scope: "col", class: each.kind }, each.head));
  const lines = rows.map((row) =>
    make("tr", {}, ...columns.map((each) => make("td", { class: each.kind }, each.cell(row)))),
  );
  return make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines));
}

export function button(text, act, kind = null) {
  return make("button", { type: "button", class: kind, click: act }, text);
}

// Where what had the keyboard is gone, it would begin at the top of the page again.
export function focusIfLost(id) {
  const has = document.activeElement ?? document.body;
  if (has === document.body || !has.checkVisibility()) byId(id).focus({ preventScroll: true });
}

// A screen reader tells what changes in a place that it knows, and not what comes with the place.
const HEARD_MS = 100;
const SHOWN_MS = 10_000;

// A sentence for whoever looks, or listens; one that `stays` does so until the next.
let next;
export function say(text, stays = false) {
  clearTimeout(next);
  const said = byId("said");
  said.textContent = "";
  placeSaid();
  next = setTimeout(() => {
    said.textContent = text;
    if (!stays) next = setTimeout(() => { said.textContent = ""; }, SHOWN_MS);
  }, HEARD_MS);
}

// Above an open dialog, which would hide it otherwise; and not in one that is closed.
function placeSaid() {
  const place = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  if (byId("said").parentElement !== place) place.append(byId("said"));
}
document.addEventListener("close", placeSaid, true);
