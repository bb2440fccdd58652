#!lua flags=allow-oom
-- A run is under way for its client no more.
-- KEYS: runs by the time until which they count, tokens of each run and their total
-- ARGV: run

local runs, tokens, run = KEYS[1], KEYS[2], ARGV[1]
if redis.call('ZREM', runs, run) == 0 then return end
redis.call('HINCRBY', tokens, 'total', -(redis.call('HGET', tokens, run) or 0))
redis.call('HDEL', tokens, run)
if redis.call('EXISTS', runs) == 0 then redis.call('DEL', tokens) end
