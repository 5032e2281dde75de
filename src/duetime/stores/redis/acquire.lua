-- Moves what is due before an instant from `due` to a claim. Returns the number of names, the first
-- due time and the last.
-- KEYS: due, the claim, leases, owners. ARGV: the instant (epoch ms), about how many at most, the
-- claim's name, owner, length of the lease in ms.
local function claimed()
  local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
  return {redis.call('ZCARD', KEYS[2]), first[2], last[2]}
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  -- Repeated because the answer was lost.
  return claimed()
end
local bound = '(' .. ARGV[1]
local last = redis.call('ZRANGE', KEYS[1], '-inf', bound, 'BYSCORE', 'LIMIT', ARGV[2] - 1, 1,
  'WITHSCORES')
if last[2] then
  -- A millisecond is never split: a cancel stays with its message.
  bound = last[2]
end
local count = redis.call('ZRANGESTORE', KEYS[2], KEYS[1], '-inf', bound, 'BYSCORE')
if count > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, count - 1)
  local now = redis.call('TIME')
  redis.call('ZADD', KEYS[3], now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[5], ARGV[3])
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[4])
end
return claimed()
