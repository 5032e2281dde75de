-- Frees some records of a claim. Returns the number left; -1 if another owner holds the claim; 0 if
-- it has no owner, because it is settled or released.
-- KEYS: the claim, due, leases, owners, begun. ARGV: the claim's name, owner, prefix of records'
-- keys, the most to free, how long to keep a cancel in seconds.
local owner = redis.call('HGET', KEYS[4], ARGV[1])
if owner ~= ARGV[2] then
  return owner and -1 or 0
end
local freed = redis.call('ZPOPMIN', KEYS[1], ARGV[4])
for at = 1, #freed, 2 do
  local key = ARGV[3] .. freed[at]
  if string.sub(freed[at], 1, 1) == '!' then
    -- A writer that repeats a batch after a crash may save the cancelled message again.
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
