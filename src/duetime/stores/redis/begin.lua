-- Notes since when a claim is taken up. Returns 0 where another reader holds it.
-- KEYS: owners, begun. ARGV: the claim's name, owner, epoch ms.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[3])
return 1
