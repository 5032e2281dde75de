-- Records when a claim was first started. Returns 0 if another owner holds it.
-- KEYS: owners, begun. ARGV: the claim's name, owner, epoch ms.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[3])
return 1
