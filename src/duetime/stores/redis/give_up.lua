-- Leaves a claim to whoever looks next.
-- KEYS: leases, owners. ARGV: the claim's name, owner.
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('ZADD', KEYS[1], 0, ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
