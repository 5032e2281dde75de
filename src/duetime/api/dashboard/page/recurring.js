// Messages that come again: listed, paused, resumed and stopped.

import { get, post, remove } from "./api.js";
import { confirm, saying } from "./dialogs.js";
import { byId, make } from "./dom.js";
import { count, time } from "./format.js";
import { List } from "./lists.js";

const list = new List("recurring-found", "recurring-table");

export function beginRecurring() {
  byId("recurring-search").addEventListener("submit", (event) => {
    event.preventDefault();
    saying(listSeries);
  });
}

async function listSeries() {
  const answer = await list.ask(get("v1/recurring"));
  if (!answer) return;
  const { series } = answer;
  const comes = series.length === 1 ? "message comes" : "messages come";
  const said = series.length ? `${count(series.length)} ${comes} again.` : "There are none.";
  list.show(said, "Messages that come again", SERIES, series);
}

const SERIES = [
  { head: "Name", kind: "id", cell: (each) => each.name },
  { head: "Topic", kind: "id", cell: (each) => each.topic },
  { head: "Cron", kind: "time", cell: (each) => make("code", {}, each.cron) },
  { head: "Zone", cell: (each) => each.zone },
  { head: "Next", kind: "time", cell: nextRun },
  { head: "Until", kind: "time", cell: (each) => (each.until_ms == null ? "" : time(each.until_ms)) },
  { head: "Change", kind: "time", cell: changes },
];

function nextRun(series) {
  if (series.paused) return "paused";
  return series.next_ms == null ? "over" : time(series.next_ms);
}

const pathOf = (name) => `v1/recurring/${encodeURIComponent(name)}`;

const PAUSE = {
  word: "Pause",
  text: "Its runs are left out until it is resumed; one that is due in less than 10 s comes yet.",
  act: (name) => post(`${pathOf(name)}/pause`),
  done: "It is paused.",
};
const RESUME = {
  word: "Resume",
  text: "It goes on with its next run.",
  act: (name) => post(`${pathOf(name)}/resume`),
  done: "It goes on.",
};
const STOP = {
  word: "Stop",
  text: "It ends for good; a run that is due in less than 10 s comes yet.",
  act: (name) => remove(pathOf(name)),
  done: "It is stopped.",
};

function changes(series) {
  const offered = [series.paused ? RESUME : PAUSE, STOP];
  return make("div", { class: "buttons" }, ...offered.map((each) => make("button", {
    type: "button", "aria-label": `${each.word} … ${series.name}`, click: () => ask(each, series.name),
  }, `${each.word} …`)));
}

function ask({ word, text, act, done }, name) {
  confirm({
    back: "recurring-found",
    title: `${word} ${name}?`,
    text,
    yes: `${word} it`,
    act: async () => {
      await act(name);
      await saying(listSeries);
      return done;
    },
  });
}
