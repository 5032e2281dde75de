-- Begins a term: writers of earlier terms can save nothing from now on. Returns its number.
-- KEYS: term.
return redis.call('INCR', KEYS[1])
