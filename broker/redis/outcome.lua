#!lua flags=allow-oom
-- Writes a run's outcome. The first writer wins.
-- KEYS: run, log, job, state
-- ARGV: event, replay_ttl (ms)
-- Answers the outcome that stands if it is another one, else nothing.

local stands = redis.call('HGET', KEYS[1], 'outcome')
if stands then return stands ~= ARGV[1] and stands end
redis.call('HSET', KEYS[1], 'outcome', ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
return false
