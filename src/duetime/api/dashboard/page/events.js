// Server-sent events, over fetch: an EventSource could not send a token.

import { request } from "./api.js";

// Silence for so long is a lost connection: the API says something every 2 s.
const SILENCE_MS = 8_000;
const PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 8_000;

// For ever: calls `on.look`, `on.trouble` with what came, and `on.lost` when the connection breaks.
export async function follow(on) {
  let pauseMs = PAUSE_MS;
  for (;;) {
    try {
      await listen((name, data) => {
        pauseMs = PAUSE_MS;
        on[name]?.(data);
      });
    } catch (error) {
      console.info("events:", error.message);
    }
    on.lost();
    await new Promise((resolve) => { setTimeout(resolve, pauseMs); });
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}

async function listen(heard) {
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
      for (const part of parts) tell(part, heard);
    }
  } finally {
    clearTimeout(silence);
    abort.abort();
  }
}

function tell(part, heard) {
  const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s).slice(0, 2)));
  if (fields.event) heard(fields.event, JSON.parse(fields.data));
}
