#!lua flags=allow-oom
-- What the workers of a model have last said, each for its own time.
-- KEYS: workers by the time until which their word counts, their words
-- ARGV: [worker, its word, ttl (ms)]
-- Answers worker, word, ... if nothing is said now.

local workers, words, worker = KEYS[1], KEYS[2], ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

for _, gone in ipairs(redis.call('ZRANGE', workers, '-inf', now, 'BYSCORE')) do
  redis.call('HDEL', words, gone)
  redis.call('ZREM', workers, gone)
end
if not worker then return redis.call('HGETALL', words) end

redis.call('ZADD', workers, now + ARGV[3], worker)
redis.call('HSET', words, worker, ARGV[2])
local till = math.max(now + ARGV[3], redis.call('PEXPIRETIME', workers))
for _, key in ipairs(KEYS) do redis.call('PEXPIREAT', key, till) end
