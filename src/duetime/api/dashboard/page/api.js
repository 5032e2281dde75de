// Requests to the API. What goes wrong is a Problem, with a sentence for people.

import { authorised, newToken } from "./token.js";

export class Problem extends Error {
  constructor(status, reason, detail) {
    super(detail);
    this.status = status;
    this.reason = reason;
  }
}

// An answer may take so long: longer than the API gives itself (`api_request_seconds`), unless it is
// configured otherwise.
const LIMIT_MS = 60_000;

// The response, once there is a token that is taken; raises Problem for any other trouble. Who gives
// a `signal` minds the time that its body takes, and says how long the API may take to begin it.
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

// Of several questions, the last: undefined is what an earlier one becomes, answered or failed.
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

// The limit is about this request alone: somebody may take long to find a token.
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
