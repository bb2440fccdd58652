#!lua
-- Counts a run as under way for its client, if the limits leave room. Those whose time is over are counted no more.
-- KEYS: runs by the time until which they count, tokens of each run and their total
-- ARGV: run, tokens, until (Unix ms), most requests, most tokens (0: no limit)
-- Answers {requests, tokens} that are under way if there is no room, else nothing.

local runs, tokens, run = KEYS[1], KEYS[2], ARGV[1]
local more, till, max_runs, max_tokens = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

for _, over in ipairs(redis.call('ZRANGE', runs, '-inf', now, 'BYSCORE')) do
  redis.call('HINCRBY', tokens, 'total', -(redis.call('HGET', tokens, over) or 0))
  redis.call('HDEL', tokens, over)
  redis.call('ZREM', runs, over)
end
if now >= till or redis.call('ZSCORE', runs, run) then return false end

local count, total = redis.call('ZCARD', runs), tonumber(redis.call('HGET', tokens, 'total') or 0)
if max_runs > 0 and count >= max_runs or max_tokens > 0 and total + more > max_tokens then return {count, total} end
redis.call('ZADD', runs, till, run)
redis.call('HSET', tokens, run, more, 'total', total + more)
till = math.max(till, redis.call('PEXPIRETIME', runs))
for _, key in ipairs(KEYS) do redis.call('PEXPIREAT', key, till) end
return false
