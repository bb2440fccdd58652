#!lua flags=allow-oom
-- Asks for a run to be cancelled. The first reason stands.
-- KEYS: run, workers
-- ARGV: reason, ttl (ms)
-- Answers 1 if nobody holds the run and it has no outcome.

local run, workers = KEYS[1], KEYS[2]
if redis.call('HEXISTS', run, 'outcome') == 1 then return 0 end
local unknown = redis.call('EXISTS', run) == 0
redis.call('HSETNX', run, 'cancel', ARGV[1])
if unknown then redis.call('PEXPIRE', run, ARGV[2]) end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local ended = redis.call('HEXISTS', run, 'ended') == 1
for _, role in ipairs({'render', 'generate', 'derender'}) do
  local owner = redis.call('HGET', run, role .. '.owner') or ''
  local till = owner ~= '' and redis.call('ZSCORE', workers, owner)
  if till and tonumber(till) > now and not (role == 'generate' and ended) then return 0 end
end
return 1
