// Lists that somebody asks for: what was asked last is shown, whatever is answered when.

import { latest } from "./api.js";
import { sentence } from "./dialogs.js";
import { byId, table } from "./dom.js";

export class List {
  #latest = latest();
  #line;
  #table;
  #parts;

  // `line` says how it went, `table` has what was found, and `more` belongs to what is in there.
  constructor(line, table, ...more) {
    this.#line = line;
    this.#table = table;
    this.#parts = [table, ...more];
  }

  // The answer, or undefined where something else was asked for since. Where it fails, nothing of
  // another question may be taken for the answer to this one, but for what it only `continues`.
  async ask(asked, continues = false) {
    byId(this.#line).textContent = "Looking …";
    try {
      return await this.#latest(asked);
    } catch (error) {
      byId(this.#line).textContent = sentence(error);
      if (!continues) for (const part of this.#parts) byId(part).hidden = true;
      throw error;
    }
  }

  show(said, caption, columns, rows) {
    byId(this.#line).textContent = said;
    byId(this.#table).hidden = !rows.length;
    byId(this.#table).replaceChildren(table(caption, columns, rows));
  }
}
