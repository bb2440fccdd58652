#!lua flags=allow-oom
-- Keeps a worker alive in one partition, and tells which of its runs are to be cancelled.
-- KEYS: workers, run, ...
-- ARGV: worker, heartbeat (ms)
-- Answers the reason, or nothing, for each run.

local workers, heartbeat = KEYS[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now)
redis.call('ZADD', workers, now + heartbeat, ARGV[1])
redis.call('PEXPIREAT', workers, math.max(now + heartbeat, redis.call('PEXPIRETIME', workers)))
local reasons = {}
for n = 2, #KEYS do reasons[n - 1] = redis.call('HGET', KEYS[n], 'cancel') end
return reasons
