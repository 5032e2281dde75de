// What a drawing shows, as a table, for who opens it.

import { byId, make, table } from "./dom.js";

export class Tabled {
  #rows = [];
  #seen = "";

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

  // Not for nothing, and not under the fingers or the keyboard of who is in it.
  #draw() {
    const there = byId(this.id);
    if (!there.parentElement.open || there.matches(":hover") || there.contains(document.activeElement)) return;
    const now = JSON.stringify(this.#rows);
    if (now === this.#seen) return;
    this.#seen = now;
    const all = this.#rows;
    there.replaceChildren(all.length ? table(this.caption, this.columns, all) : make("p", {}, "Nothing."));
  }
}
