// Requests to the API. What goes wrong is a Problem, with a sentence for people.

import { authorised, newToken } from "./token.js";

export class Problem extends Error {
  constructor(status, reason, detail) {
    super(detail);
    this.status = status;
    this.reason = reason;
  }
}

// The response, once there is a token that is taken; raises Problem for any other trouble.
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
  return (await request(text ? `${path}?${text}` : path)).json();
}

export async function post(path, body = undefined) {
  const json = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return (await request(path, { method: "POST", ...json })).json();
}

export const remove = (path) => request(path, { method: "DELETE" });

async function reached(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "lost", "The API does not answer: is it running?");
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
