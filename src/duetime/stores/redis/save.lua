-- Saves records that are neither there nor cancelled. Rejects a writer of an earlier term: its
-- records may have been delivered while it was paused.
-- KEYS: due, term. ARGV: the writer's term, prefix of records' keys, length of a packed origin; then
-- name, due ms and packed record of each.
if ARGV[1] ~= redis.call('GET', KEYS[2]) then
  return redis.error_reply('another writer has begun since')
end
local records, origin = ARGV[2], tonumber(ARGV[3])
for at = 4, #ARGV, 3 do
  local name, due_ms, packed = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local key = records .. name
  local there = redis.call('GETRANGE', key, 0, origin - 1)
  -- Another record with the id of a claimed one is saved; with the id of a waiting one, dropped.
  local is_known = there == string.sub(packed, 1, origin)
    or (there ~= '' and redis.call('ZSCORE', KEYS[1], name))
  if not is_known and redis.call('EXISTS', records .. '!' .. name) == 0 then
    redis.call('SET', key, packed)
    redis.call('ZADD', KEYS[1], due_ms, name)
  end
end
