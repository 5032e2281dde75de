// What waits, slot by slot, as bars over a stretch of time: arithmetic only.

export const BARS = 60;

// Bars from `nowMs` on. A slot that fits into a bar counts there; a wider one is spread evenly over
// the bars that it covers, because nobody knows where in it its messages are.
export function bins(slots, nowMs, widthMs, bars = BARS) {
  const barMs = widthMs / bars;
  const found = Array.from({ length: bars }, (_, index) => ({
    from: nowMs + index * barMs,
    to: nowMs + (index + 1) * barMs,
    exact: 0,
    spread: 0,
  }));
  let late = 0, beyond = 0;
  for (const slot of slots) {
    const from = Math.max(slot.from_ms, nowMs);
    if (slot.to_ms <= nowMs) { late += slot.count; continue; }
    const perMs = slot.count / (slot.to_ms - from);
    beyond += perMs * Math.max(0, slot.to_ms - Math.max(from, nowMs + widthMs));
    const first = Math.max(0, Math.floor((from - nowMs) / barMs));
    const last = Math.min(bars - 1, Math.ceil((slot.to_ms - nowMs) / barMs) - 1);
    for (let index = first; index <= last; index += 1) {
      const bar = found[index];
      const share = perMs * (Math.min(slot.to_ms, bar.to) - Math.max(from, bar.from));
      // A slot that only touches a second bar is as good as in one.
      if (slot.to_ms - from <= barMs) bar.exact += share;
      else bar.spread += share;
    }
  }
  return { bars: found, late, beyond };
}

export const total = (bar) => bar.exact + bar.spread;

// The last instant at which anything is due, from now.
export const reach = (slots, nowMs) => Math.max(60_000, ...slots.map((each) => each.to_ms - nowMs));

// The least round number that is not less: 1, 2 or 5 and zeros.
export function roundUp(number) {
  if (number <= 1) return 1;
  const size = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((each) => each * size).find((each) => each >= number);
}
