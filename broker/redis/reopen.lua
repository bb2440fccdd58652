#!lua
-- Takes back a run's outcome, cancellation and ledger; nobody holds it, and what an earlier holder writes is fenced.
-- KEYS: run, log, job, state
-- ARGV: deadline, replay_ttl (Unix ms, ms), 1 if its log and all that came of it are forgotten

local run, deadline = KEYS[1], tonumber(ARGV[1])
if redis.call('EXISTS', run) == 0 then return end
redis.call('HDEL', run, 'outcome', 'cancel')
for _, role in ipairs({'render', 'generate', 'derender'}) do
  redis.call('HDEL', run, role .. '.owner', role .. '.attempts', role .. '.rescues')
  if redis.call('HEXISTS', run, role .. '.epoch') == 1 then redis.call('HINCRBY', run, role .. '.epoch', 1) end
end
if ARGV[3] == '1' then
  redis.call('HDEL', run, 'digest', 'chunks', 'ended', 'last')
  redis.call('DEL', unpack(KEYS, 2))
end
redis.call('HSET', run, 'deadline', deadline)
for _, key in ipairs(KEYS) do redis.call('PEXPIREAT', key, deadline + ARGV[2]) end
