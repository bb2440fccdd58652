#!lua
-- Takes a run for a role, or says why not.
-- KEYS: run, log, job, workers
-- ARGV: role, worker, call, digest, deadline, replay_ttl, heartbeat (Unix ms, ms, ms), max_attempts, max_rescues,
--   rescues from which on the run is not for this worker (a suspect, and it tries another; 0: it takes suspects), [job]
-- Answers {answer, epoch, chunks, attempts, rescues, outcome or reason, job for role derender}. `call` is the asker's
-- number for this claim: the same one again means that our reply was lost, and is answered as before.

local run, log, job, workers = unpack(KEYS)
local role, worker, call, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local replay_ttl, heartbeat = tonumber(ARGV[6]), tonumber(ARGV[7])
local max_attempts, max_rescues, suspect_from = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local known = redis.call('HMGET', run, 'outcome', 'cancel', 'deadline', 'ended', 'chunks',
  role .. '.owner', role .. '.epoch', 'digest', role .. '.call', role .. '.attempts', role .. '.rescues')
local outcome, cancel, ended, owner, first = known[1], known[2], known[4], known[6] or '', known[8] or ''
local deadline = tonumber(known[3] or ARGV[5])
local chunks, epoch = tonumber(known[5] or 0), tonumber(known[7] or 0)
local attempts, rescues = tonumber(known[10] or 0), tonumber(known[11] or 0)

local function answer(what, extra)
  local held = (what == 'new' or what == 'mine') and epoch or 0
  local content = role == 'derender' and redis.call('GET', job)
  return {what, held, chunks, attempts, rescues, extra or false, content}
end

local function lives(who)
  local till = redis.call('ZSCORE', workers, who)
  return till and tonumber(till) > now
end

local function show_life()
  redis.call('ZADD', workers, now + heartbeat, worker)
  redis.call('PEXPIREAT', workers, math.max(now + heartbeat, redis.call('PEXPIRETIME', workers)))
end

if first == '' then first = digest elseif digest ~= '' and digest ~= first then return answer('conflict') end
if (outcome or cancel) and first ~= (known[8] or '') then redis.call('HSET', run, 'digest', first) end
if outcome then return answer('done', outcome) end
local held = owner ~= '' and (owner == worker or lives(owner))
if cancel and not held then return answer('cancelled', cancel) end
if now >= deadline then return answer('expired') end
if role == 'generate' and ended then return answer('ended') end
if owner == worker then
  show_life()
  return answer(known[9] == call and 'new' or 'mine')
end
if held then return answer('alive') end

local rescue = owner ~= '' and 1 or 0 -- it did not let go: it died
if attempts >= max_attempts or rescues + rescue > max_rescues then return answer('exhausted') end
if suspect_from > 0 and rescues + rescue >= suspect_from then return answer('suspect') end
epoch, rescues = epoch + 1, rescues + rescue
show_life()
redis.call('HSET', run, 'deadline', deadline, 'chunks', chunks, role .. '.owner', worker, role .. '.epoch', epoch,
  'digest', first, role .. '.call', call, role .. '.attempts', attempts, role .. '.rescues', rescues)
if role == 'generate' then
  local begin = cjson.encode({worker = worker, at = now / 1000, chunks = chunks})
  local last = epoch .. '-0'
  redis.call('XADD', log, last, 'begin', begin, 'before', 0)
  redis.call('HSET', run, 'last', last)
end
if ARGV[11] then redis.call('SET', job, ARGV[11], 'NX') end
for _, key in ipairs({run, log, job}) do redis.call('PEXPIREAT', key, deadline + replay_ttl) end
return answer('new')
