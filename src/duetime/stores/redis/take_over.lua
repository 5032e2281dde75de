-- Takes over the claims whose lease has ended, but not those that the caller works on: a reader that
-- stood still goes on with them. Returns name, count and since when it is begun of each.
-- KEYS: leases, owners, begun. ARGV: how claims' keys begin, owner, length of the lease in ms, then
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
    table.insert(taken, {name, redis.call('ZCARD', ARGV[1] .. name), begun_ms})
  end
end
return taken
