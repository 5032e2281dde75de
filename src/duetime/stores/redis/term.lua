-- Begins a term: who began before saves nothing more. Returns its number.
-- KEYS: term.
return redis.call('INCR', KEYS[1])
