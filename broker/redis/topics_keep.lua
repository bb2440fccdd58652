#!lua flags=allow-oom
-- Keeps a subscription for another lease, and lets go of what its reader is done with.
-- KEYS: subscriptions, its stream
-- ARGV: lease (ms), [the first entry that is still wanted]
-- Answers 1, or 0 if the subscription is gone.

local subscriptions, stream, lease = KEYS[1], KEYS[2], tonumber(ARGV[1])
if redis.call('PEXPIRE', stream, lease) == 0 then return 0 end
redis.call('PEXPIRE', subscriptions, math.max(lease, redis.call('PTTL', subscriptions)))
if ARGV[2] then redis.call('XTRIM', stream, 'MINID', ARGV[2]) end
return 1
