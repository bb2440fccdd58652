#!lua flags=allow-oom
-- Writes the outcome of a request that cannot be served, unless the run is another request's. The first writer wins.
-- KEYS: run, log, job, state
-- ARGV: digest, event, replay_ttl (ms)
-- Answers the outcome that stands, or nothing if the run has another digest.

local run, digest = KEYS[1], ARGV[1]
local known = redis.call('HMGET', run, 'digest', 'outcome')
local first, stands = known[1] or '', known[2]
if first ~= '' and first ~= digest then return false end
redis.call('HSET', run, 'digest', digest, 'outcome', stands or ARGV[2])
if stands then return stands end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
return ARGV[2]
