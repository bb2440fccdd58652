#!lua
-- Makes a subscription exist. One of this name that is there already listens to the pattern as well.
-- KEYS: subscriptions (name -> "<limit> <pattern> ..."), its stream
-- ARGV: name, pattern, limit, lease (ms)
-- Answers nothing, or the limit under which it exists where that is another one.

local subscriptions, stream = KEYS[1], KEYS[2]
local name, pattern, limit, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local there = redis.call('EXISTS', stream) == 1
local known = there and redis.call('HGET', subscriptions, name)
if known and known:match('^%d+') ~= limit then return known:match('^%d+') end
if not known then
  known = limit .. ' ' .. pattern
elseif not (known .. ' '):find(' ' .. pattern .. ' ', 1, true) then
  known = known .. ' ' .. pattern
end
if not there then redis.call('XADD', stream, 'MAXLEN', 0, '0-1', 'opened', '') end -- a stream without an entry
redis.call('HSET', subscriptions, name, known)
redis.call('PEXPIRE', stream, lease)
redis.call('PEXPIRE', subscriptions, math.max(lease, redis.call('PTTL', subscriptions)))
return false
