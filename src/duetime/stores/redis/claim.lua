-- Takes what is due before an instant out of `due`, for one reader. Returns how many those are.
-- KEYS: due, the claim, leases, owners. ARGV: before when (epoch ms), about how many at most, the
-- claim's name, owner, length of the lease in ms.
if redis.call('EXISTS', KEYS[2]) == 1 then
  -- Asked again, because the answer did not come.
  return redis.call('ZCARD', KEYS[2])
end
local bound = '(' .. ARGV[1]
local last = redis.call('ZRANGE', KEYS[1], '-inf', bound, 'BYSCORE', 'LIMIT', ARGV[2] - 1, 1,
  'WITHSCORES')
if last[2] then
  -- All of one ms together: a cancel stays with what it cancels.
  bound = last[2]
end
local count = redis.call('ZRANGESTORE', KEYS[2], KEYS[1], '-inf', bound, 'BYSCORE')
if count > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, count - 1)
  local now = redis.call('TIME')
  redis.call('ZADD', KEYS[3], now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[5], ARGV[3])
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[4])
end
return count
