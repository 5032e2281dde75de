-- Ends a claim's lease: the next overdue scan takes it over.
-- KEYS: leases, owners. ARGV: the claim's name, owner.
if redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('ZADD', KEYS[1], 0, ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
