-- Takes over claims whose lease has ended, except those that the caller works on: it was paused, and
-- continues with them. Returns the name, start instant and count of each, and the first due time
-- and the last.
-- KEYS: leases, owners, begun. ARGV: prefix of claims' keys, owner, length of the lease in ms, then
-- the names that the caller works on.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local busy = {}
for at = 4, #ARGV do
  busy[ARGV[at]] = true
end
local taken = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)) do
  if not busy[name] then
    redis.call('ZADD', KEYS[1], now_ms + ARGV[3], name)
    redis.call('HSET', KEYS[2], name, ARGV[2])
    local begun_ms = redis.call('HGET', KEYS[3], name) or ''
    local claim = ARGV[1] .. name
    local first = redis.call('ZRANGE', claim, 0, 0, 'WITHSCORES')
    local last = redis.call('ZRANGE', claim, -1, -1, 'WITHSCORES')
    table.insert(taken, {name, begun_ms, redis.call('ZCARD', claim), first[2], last[2]})
  end
end
return taken
