// What charts have in common: the grid, and the content as a table.

import { byId, draw, make, table } from "./dom.js";
import { compact } from "./format.js";

// The width of the numbers beside a chart.
export const LEFT = 44;

export function grid(most, y, width) {
  return [0, most / 2, most].flatMap((each) => [
    draw("line", { class: "grid", x1: LEFT, x2: width, y1: y(each), y2: y(each) }),
    draw("text", { x: LEFT - 6, y: y(each) + 4, "text-anchor": "end" }, compact(each)),
  ]);
}

// The least round number that is not less: 1, 2 or 5 with zeros.
export function roundUp(number) {
  if (number <= 1) return 1;
  const size = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((each) => each * size).find((each) => each >= number);
}

// The content of a chart as a table, which is drawn while it is open.
export class ChartTable {
  #rows = [];
  #drawn = "";

  constructor(id, caption, columns) {
    this.id = id;
    this.caption = caption;
    this.columns = columns;
    byId(id).parentElement.addEventListener("toggle", () => this.#draw());
  }

  show(rows) {
    this.#rows = rows;
    this.#draw();
  }

  // Leaves the table as it is without a change, and while the pointer or the keyboard is in it.
  #draw() {
    const element = byId(this.id);
    if (!element.parentElement.open || element.matches(":hover") || element.contains(document.activeElement)) return;
    const now = JSON.stringify(this.#rows);
    if (now === this.#drawn) return;
    this.#drawn = now;
    const rows = this.#rows;
    element.replaceChildren(rows.length ? table(this.caption, this.columns, rows) : make("p", {}, "Nothing."));
  }
}
