#!lua
-- Stores the derender checkpoint, if the epoch is the current one.
-- KEYS: run, state
-- ARGV: epoch, state
-- Answers 1, or 0 if another epoch has taken over.

if redis.call('HGET', KEYS[1], 'derender.epoch') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PEXPIREAT', KEYS[2], redis.call('PEXPIRETIME', KEYS[1]))
return 1
