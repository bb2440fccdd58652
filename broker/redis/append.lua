#!lua
-- Adds a batch of entries to a run's log: all of them or none.
-- KEYS: run, log
-- ARGV: epoch, after (id), k of the first, 1 if the last is the end, then payload and running hash of each
-- Answers stored | already | fenced | lost, or {that, reason} if the run is to be cancelled.

local run, log = KEYS[1], KEYS[2]
local epoch, after, k, ends = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local count = (#ARGV - 4) / 2
local known = redis.call('HMGET', run, 'outcome', 'generate.epoch', 'last', 'chunks', 'ended', 'cancel')
local last, cancel = known[3], known[6]

local function answer(what) return cancel and {what, cancel} or what end
local function id(n) return string.format('%s-%d', ARGV[1], k + n - 1) end
local function kind(n) return ends and n == count and 'end' or 'chunk' end

local function is_there()
  local entries = redis.call('XRANGE', log, id(1), id(count))
  if #entries ~= count then return false end
  for n, entry in ipairs(entries) do
    if entry[2][1] ~= kind(n) or entry[2][2] ~= ARGV[3 + 2 * n] then return false end
  end
  return true
end

if known[1] then return answer('fenced') end
local current = tonumber(known[2] or 0)
if current > epoch then return answer('fenced') end
if current < epoch then return answer('lost') end -- the claim itself is gone
if last == id(count) then return answer(is_there() and 'already' or 'lost') end
if known[5] then return answer('fenced') end
if last ~= after or k ~= known[4] + 1 then return answer('lost') end

for n = 1, count do
  local added = redis.call('XADD', log, 'NOMKSTREAM', id(n), kind(n), ARGV[3 + 2 * n], 'before', ARGV[4 + 2 * n])
  if not added then return answer('lost') end
end
redis.call('HSET', run, 'last', id(count), 'chunks', ends and k + count - 2 or k + count - 1)
if ends then redis.call('HSET', run, 'ended', 1) end
return answer('stored')
