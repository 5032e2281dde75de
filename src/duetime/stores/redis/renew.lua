-- Extends the leases of claims that the owner still holds.
-- KEYS: leases, owners. ARGV: owner, length of the lease in ms, then claims' names.
local now = redis.call('TIME')
local until_ms = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[2]
for at = 3, #ARGV do
  if redis.call('HGET', KEYS[2], ARGV[at]) == ARGV[1] then
    redis.call('ZADD', KEYS[1], until_ms, ARGV[at])
  end
end
