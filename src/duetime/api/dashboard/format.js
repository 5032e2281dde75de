// Numbers and times for people, in the time zone of the browser.

import { make } from "./dom.js";

const COUNT = new Intl.NumberFormat("en");
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const INSTANT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

const UNITS = [["y", 31_557_600_000], ["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1_000]];

export const count = (number) => COUNT.format(number);
export const counted = (number, noun) => `${count(number)} ${number === 1 ? noun : `${noun}s`}`;
export const compact = (number) => COMPACT.format(number);
export const rate = (number) => (number < 10 ? SMALL.format(number) : COUNT.format(Math.round(number)));
export const instant = (ms) => INSTANT.format(new Date(ms));

export function time(ms) {
  return make("time", { datetime: new Date(ms).toISOString() }, instant(ms));
}

// The two largest units.
export function duration(ms) {
  let rest = Math.max(0, ms);
  const words = [];
  for (const [unit, width] of UNITS) {
    const amount = Math.floor(rest / width);
    rest -= amount * width;
    if (amount) words.push(`${amount} ${unit}`);
  }
  return words.slice(0, 2).join(" ") || "0 s";
}

export const fromNow = (ms, nowMs) => (ms >= nowMs ? `in ${duration(ms - nowMs)}` : `${duration(nowMs - ms)} ago`);

// An instant on an axis of this width.
export function tick(ms, widthMs) {
  const day = { day: "numeric", month: "short" };
  const style =
    widthMs <= 900_000 ? { timeStyle: "medium" }
      : widthMs <= 86_400_000 ? { timeStyle: "short" }
        : widthMs <= 31 * 86_400_000 ? day
          : widthMs <= 10 * 31_557_600_000 ? { month: "short", year: "numeric" } : { year: "numeric" };
  return new Intl.DateTimeFormat(undefined, style).format(new Date(ms));
}

// From the value of a field of local time to the API's instant, and back.
export const asInstant = (local) => new Date(local).toISOString();
export function asLocal(ms) {
  const there = new Date(ms - new Date(ms).getTimezoneOffset() * 60_000);
  return there.toISOString().slice(0, 19);
}
