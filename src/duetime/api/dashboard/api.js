// Requests to the API, with its token and its events. An error is a Problem, with a sentence for people.

import { byId } from "./dom.js";

export class Problem extends Error {
  constructor(status, reason, detail) {
    super(detail);
    this.status = status;
    this.reason = reason;
  }
}

// The time limit of a request: longer than the default of `api_request_timeout_seconds`.
const LIMIT_MS = 60_000;

// Returns the response, once there is a valid token. Throws a Problem otherwise. With a `signal`, the
// caller limits the time of the body, and `limitMs` that of the headers.
export async function request(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers, ...authorised() };
    const response = await reached(path, { ...options, headers });
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw problem;
    await newToken("Authorization" in headers);
  }
}

export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const text = new URLSearchParams(given).toString();
  return bodyOf(await request(text ? `${path}?${text}` : path));
}

export async function post(path, body = undefined) {
  const json = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return bodyOf(await request(path, { method: "POST", ...json }));
}

export const remove = (path) => request(path, { method: "DELETE" });

// Returns a function that awaits a request; undefined if another one was made since.
export function latest() {
  let last = 0;
  return async (asked) => {
    const number = ++last;
    try {
      const answer = await asked;
      return number === last ? answer : undefined;
    } catch (error) {
      if (number === last) throw error;
      return undefined;
    }
  };
}

const lost = () => new Problem(0, "lost", "The API does not answer: is it running?");

// The limit is that of one request: entering a token may take longer.
async function reached(path, { signal, limitMs = LIMIT_MS, ...options }) {
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(), limitMs);
  const signals = AbortSignal.any(signal ? [signal, late.signal] : [late.signal]);
  try {
    const response = await fetch(path, { cache: "no-store", ...options, signal: signals });
    if (signal) clearTimeout(timer);
    return response;
  } catch (error) {
    clearTimeout(timer);
    if (signal?.aborted) throw error;
    throw lost();
  }
}

async function bodyOf(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error instanceof SyntaxError) throw error;
    throw lost();
  }
}

async function problemOf(response) {
  try {
    const told = await response.json();
    return new Problem(response.status, told.reason, told.detail);
  } catch {
    return new Problem(response.status, "error", `The API answered ${response.status}.`);
  }
}

// Events come over fetch, because an EventSource cannot send a token.
// Without an event for so long the connection is lost: the API sends one every 2 s.
const SILENCE_MS = 8_000;
const RETRY_DELAY_MS = 1_000;
const MAX_RETRY_DELAY_MS = 8_000;

// Calls `on.snapshot` and `on.problem` with each event, and `on.lost` when the connection breaks; for ever.
export async function follow(on) {
  let delayMs = RETRY_DELAY_MS;
  for (;;) {
    try {
      await listen((name, data) => {
        delayMs = RETRY_DELAY_MS;
        on[name]?.(data);
      });
    } catch (error) {
      console.info("events:", error.message);
    }
    on.lost();
    await new Promise((resolve) => { setTimeout(resolve, delayMs); });
    delayMs = Math.min(2 * delayMs, MAX_RETRY_DELAY_MS);
  }
}

async function listen(handle) {
  const abort = new AbortController();
  const response = await request("v1/events", { signal: abort.signal, limitMs: SILENCE_MS });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let silence, text = "";
  try {
    for (;;) {
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
      const { value, done } = await reader.read();
      clearTimeout(silence);
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) dispatch(part, handle);
    }
  } finally {
    clearTimeout(silence);
    abort.abort();
  }
}

function dispatch(part, handle) {
  const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s).slice(0, 2)));
  if (fields.event) handle(fields.event, JSON.parse(fields.data));
}

// The token, if the API needs one, is in the session storage of this tab only.
const NAME = "duetime-token";

const authorised = () => {
  const token = sessionStorage.getItem(NAME);
  return token ? { Authorization: `Bearer ${token}` } : {};
};

let asked = null;

// Resolves when another token is entered. Concurrent requests wait for the same one.
function newToken(refused) {
  asked ??= ask(refused).finally(() => { asked = null; });
  return asked;
}

function ask(refused) {
  const dialog = byId("ask-token");
  const field = dialog.querySelector("input");
  byId("token-wrong").textContent = refused ? "The API does not know this token." : "";
  field.value = "";
  field.oninvalid = () => {
    // Other characters cannot be sent in a header.
    if (field.validity.patternMismatch) byId("token-wrong").textContent = "A token has letters, digits and signs of ASCII, and no spaces.";
  };
  return new Promise((resolve) => {
    const submitted = () => {
      sessionStorage.setItem(NAME, field.value);
      field.value = "";
      byId("forget").hidden = false;
      dialog.onclose = null;
      resolve();
    };
    dialog.querySelector("form").onsubmit = submitted;
    // Without a token there is nothing to show. A browser lets a second Escape close the dialog.
    dialog.onclose = () => dialog.showModal();
    dialog.showModal();
  });
}

export function initToken() {
  byId("forget").hidden = !sessionStorage.getItem(NAME);
  byId("forget").addEventListener("click", () => {
    sessionStorage.removeItem(NAME);
    location.reload();
  });
}
