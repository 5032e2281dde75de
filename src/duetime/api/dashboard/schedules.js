// Schedules: list, pause, resume and stop.

import { get, post, remove } from "./api.js";
import { announceErrors, confirm, List, onSubmit } from "./dialogs.js";
import { button, make } from "./dom.js";
import { counted, time } from "./format.js";

const list = new List("schedules-found", "schedules-table");

export function initSchedules() {
  onSubmit("schedules-search", listSchedules);
}

async function listSchedules() {
  const answer = await list.ask(get("v1/schedules"));
  if (!answer) return;
  const { schedules } = answer;
  const found = `${counted(schedules.length, "schedule")}.`;
  list.show(schedules.length ? found : "There are none.", "Schedules", COLUMNS, schedules);
}

const COLUMNS = [
  { head: "Name", kind: "id", cell: (each) => each.name },
  { head: "Topic", kind: "id", cell: (each) => each.topic },
  { head: "Cron", kind: "time", cell: (each) => make("code", {}, each.cron) },
  { head: "Zone", cell: (each) => each.zone },
  { head: "Next", kind: "time", cell: nextRun },
  { head: "Until", kind: "time", cell: (each) => (each.until_ms == null ? "" : time(each.until_ms)) },
  { head: "Change", kind: "time", cell: changes },
];

function nextRun(schedule) {
  if (schedule.paused) return "paused";
  return schedule.next_ms == null ? "over" : time(schedule.next_ms);
}

const pathOf = (name) => `v1/schedules/${encodeURIComponent(name)}`;

const PAUSE = {
  word: "Pause",
  text: "Its runs are skipped until it is resumed; a run that is due within 10 s is still delivered.",
  act: (name) => post(`${pathOf(name)}/pause`),
  done: "It is paused.",
};
const RESUME = {
  word: "Resume",
  text: "It continues with its next run.",
  act: (name) => post(`${pathOf(name)}/resume`),
  done: "It continues.",
};
const STOP = {
  word: "Stop",
  text: "It ends for good; a run that is due within 10 s is still delivered.",
  act: (name) => remove(pathOf(name)),
  done: "It is stopped.",
};

function changes(schedule) {
  const offered = [schedule.paused ? RESUME : PAUSE, STOP];
  return make("div", { class: "buttons" }, ...offered.map((each) =>
    button(`${each.word} …`, () => ask(each, schedule.name), { label: `${each.word} … ${schedule.name}` })));
}

function ask({ word, text, act, done }, name) {
  confirm({
    back: "schedules-found",
    title: `${word} ${name}?`,
    text,
    yes: `${word} it`,
    act: async () => {
      await act(name);
      await announceErrors(listSchedules);
      return done;
    },
  });
}
