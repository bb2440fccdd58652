#!lua flags=allow-oom
-- Lets go of a run. Once let go of, or under another epoch, it changes nothing.
-- KEYS: run
-- ARGV: role, epoch, 1 if an attempt is used

local run, role = KEYS[1], ARGV[1]
local known = redis.call('HMGET', run, role .. '.epoch', role .. '.owner')
if known[1] ~= ARGV[2] or known[2] == '' then return end
redis.call('HSET', run, role .. '.owner', '')
redis.call('HINCRBY', run, role .. '.attempts', ARGV[3])
