-- Frees some of what a claim holds. Returns how many are left; -1 where another reader holds it, and 0
-- where none does: it is settled already, or given up.
-- KEYS: the claim, due, leases, owners, begun. ARGV: the claim's name, owner, how records' keys
-- begin, how many at once, how long a cancel is kept in seconds.
local owner = redis.call('HGET', KEYS[4], ARGV[1])
if owner ~= ARGV[2] then
  return owner and -1 or 0
end
local freed = redis.call('ZPOPMIN', KEYS[1], ARGV[4])
for at = 1, #freed, 2 do
  local key = ARGV[3] .. freed[at]
  if string.sub(freed[at], 1, 1) == '!' then
    -- What it has cancelled may be saved again, by who repeats what a crash has interrupted.
    redis.call('EXPIRE', key, ARGV[5])
  elseif not redis.call('ZSCORE', KEYS[2], freed[at]) then
    redis.call('UNLINK', key)
  end
end
local left = redis.call('ZCARD', KEYS[1])
if left == 0 then
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('HDEL', KEYS[4], ARGV[1])
  redis.call('HDEL', KEYS[5], ARGV[1])
end
return left
