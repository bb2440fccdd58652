#!lua
-- Adds messages to the stream of each subscription of a client that wants them. The oldest make room for the newest.
-- KEYS: subscriptions; the streams, which are touched besides, share its slot
-- ARGV: what a stream's key is before its subscription's name; then of each message key, body, request_id, 1 if durable
-- Answers how many durable messages nobody heard. What a client has made of its own keys harms nobody else: a
-- subscription that cannot be is passed over, a stream that takes nothing is as good as gone.

local subscriptions = KEYS[1]

local function words_of(text)
  local words = {}
  for word in (text .. '.'):gmatch('([^.]*)%.') do words[#words + 1] = word end
  return words
end

local function matches(pattern, words) -- * stands for one word, # for any number; at worst #pattern * #words steps
  local p, w, hash, from = 1, 1, nil, nil
  while w <= #words do
    if pattern[p] == '#' then
      hash, from, p = p, w, p + 1
    elseif pattern[p] == '*' or pattern[p] == words[w] then
      p, w = p + 1, w + 1
    elseif hash then
      p, w, from = hash + 1, from + 1, from + 1
    else
      return false
    end
  end
  while pattern[p] == '#' do p = p + 1 end
  return p > #pattern
end

local open = {}
local known = redis.pcall('HGETALL', subscriptions)
for n = 1, known.err and 0 or #known, 2 do
  local limit, patterns = known[n + 1]:match('^(%d+) (.*)$')
  local one = {name = known[n], stream = ARGV[1] .. known[n], limit = limit, patterns = {}}
  for pattern in (patterns or ''):gmatch('%S+') do one.patterns[#one.patterns + 1] = words_of(pattern) end
  open[#open + 1] = one
end

local function wants(one, words)
  for _, pattern in ipairs(one.patterns) do
    if matches(pattern, words) then return true end
  end
  return false
end

local unheard = 0
for n = 2, #ARGV, 4 do
  local words, heard = words_of(ARGV[n]), false
  for _, one in ipairs(open) do
    if not one.gone and wants(one, words) then
      local added = redis.pcall('XADD', one.stream, 'NOMKSTREAM', 'MAXLEN', one.limit, '*',
        'key', ARGV[n], 'body', ARGV[n + 1], 'request_id', ARGV[n + 2], 'durable', ARGV[n + 3])
      if type(added) == 'string' then
        heard = true
      else -- its lease ran out, or it is no stream
        one.gone = true
        redis.call('HDEL', subscriptions, one.name)
      end
    end
  end
  if ARGV[n + 3] == '1' and not heard then unheard = unheard + 1 end
end
return unheard
