-- Begins a term: who began before saves nothing more. Returns its number.
-- KEYS: term.
local term = (tonumber(redis.call('GET', KEYS[1])) or 0) + 1
-- As in `claim`.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], term)
return term
