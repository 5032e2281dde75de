-- Saves records, each once, unless a cancel is there. Refuses a writer whose term is over: what it
-- was paused with may be delivered by now.
-- KEYS: due, term. ARGV: the writer's term, how records' keys begin, length of a packed place; then
-- name, due ms and packed record of each.
if ARGV[1] ~= redis.call('GET', KEYS[2]) then
  return redis.error_reply('another writer has begun since')
end
local records, place = ARGV[2], tonumber(ARGV[3])
for at = 4, #ARGV, 3 do
  local name, due_ms, packed = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local key = records .. name
  local there = redis.call('GETRANGE', key, 0, place - 1)
  -- Another record with the id of one that is claimed waits anew; of one that waits, it is dropped.
  local again = there == string.sub(packed, 1, place)
    or (there ~= '' and redis.call('ZSCORE', KEYS[1], name))
  if not again and redis.call('EXISTS', records .. '!' .. name) == 0 then
    redis.call('SET', key, packed)
    redis.call('ZADD', KEYS[1], due_ms, name)
  end
end
