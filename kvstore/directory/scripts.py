"""What Redis is asked to do in one go, as Lua.

Each script touches keys of one slot only, all made from its one key. Work in one call is bounded:
``reach`` reads about log2(blocks) + 2 fields of each shard, ``publish`` takes at most
``MOST_RECORDS`` records, ``sweep`` one page of one bucket; those of the membership are as long as
there are members.

Memory: Redis refuses a script's first write where its limit is reached, and lets what follows pass.
``publish`` therefore stores before it removes, so that blocks are refused; the scripts of the
membership first take something away, so that a full Redis still knows who its members are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1
from typing import Final

from kvstore.directory.changes import RECORD_BYTES
from kvstore.directory.interface import MOST_OWNERS
from kvstore.directory.names import HASH_PART, NUMBER_BYTES

MOST_RECORDS: Final = 128
"""Records in one call of ``publish``: about half a millisecond of Redis's time."""

MOST_LEASE: Final = 60_000
"""Milliseconds that a lease may last; a longer one comes of a clock that was set back."""

COMMANDS: Final = (
    "eval evalsha scan info get set del exists pexpire pttl time sadd srem smembers "
    "hget hset hsetnx hmget hdel hgetall hincrby hscan"
)
"""What a user of Redis must be allowed, on keys ``kvs:*``. In a cluster also what its clients ask,
``cluster`` and ``command``. Without ``info`` everything is told anew after each outage.
"""

_TAG_SECONDS: Final = 86_400

_COMMON: Final = """
-- Where a list of numbers, four bytes each, has this one.
local function named(list, number)
  local at = 0
  repeat
    at = string.find(list, number, at + 1, true)
  until not at or at % 4 == 1
  return at
end

-- The bucket of a block, by the part of its hash that is kept.
local function bucket(part)
  return KEYS[1] .. string.format(':%03x', string.byte(part, 1) + string.byte(part, 2) % 4 * 256)
end
"""


@dataclass(frozen=True)
class Script:
    """One of them.

    Attributes:
        name: of the operation, for statistics.
        text: in Lua.
    """

    name: str
    text: str

    @cached_property
    def digest(self) -> str:
        """By which Redis knows it."""
        return sha1(self.text.encode(), usedforsecurity=False).hexdigest()


REACH: Final = Script(
    "reach",
    _COMMON
    + f"""
-- KEYS[1]: a tag. ARGV: parts of hashes, one after the other; number of shards; live members.
-- Returns how many leading blocks every shard has a live owner for, and by shard the owners of the
-- last behind the number of their bytes: in one string, which is read faster than a list.
-- What an owner holds is whole prefixes, so that bisection finds it.
local hashes, shards, live = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local function alive(value)
  for at = 1, #value, {NUMBER_BYTES} do
    if named(live, string.sub(value, at, at + 3)) then return true end
  end
  return false
end

local function owners(block)
  local part = string.sub(hashes, block * {HASH_PART} + 1, block * {HASH_PART} + {HASH_PART})
  local key, rest, fields = bucket(part), string.sub(part, 3), {{}}
  for shard = 0, shards - 1 do fields[shard + 1] = struct.pack('<I2', shard) .. rest end
  local values = redis.call('HMGET', key, unpack(fields))
  for shard = 1, shards do
    if not values[shard] or not alive(values[shard]) then return nil end
  end
  return values
end

local count = math.floor(#hashes / {HASH_PART})
local nothing = struct.pack('<I4', 0)
if count == 0 then return nothing end
local has, lacks = 0, count - 1
-- The last first: where all is held, as after a put of the whole chain, it is the only one.
local best = owners(lacks)
if best then
  has = lacks
else
  best = count > 1 and owners(0)
  if not best then return nothing end
  while lacks - has > 1 do
    local middle = math.floor((has + lacks) / 2)
    local found = owners(middle)
    if found then has, best = middle, found else lacks = middle end
  end
end
local answer = struct.pack('<I4', has + 1)
for shard = 1, shards do
  answer = answer .. struct.pack('<I4', #best[shard]) .. best[shard]
end
return answer
""",
)

PUBLISH: Final = Script(
    "publish",
    _COMMON
    + f"""
-- KEYS[1]: a tag. ARGV: records of a kind (S or R), the name of a block, the number of a member.
-- Returns whether nothing was known under the tag, and whether blocks were refused for memory.
local records, full = ARGV[1], 0
local fresh = 1 - redis.call('EXISTS', KEYS[1])

local function record(at)
  local part = string.sub(records, at + 3, at + 2 + {HASH_PART})
  local field = string.sub(records, at + 1, at + 2) .. string.sub(part, 3)
  return bucket(part), field, string.sub(records, at + 15, at + 18)
end

for at = 1, #records, {RECORD_BYTES} do
  if string.byte(records, at) == 83 then
    local key, field, number = record(at)
    -- Most blocks are new: one command then.
    local done = redis.pcall('HSETNX', key, field, number)
    if done == 0 then
      local value = redis.call('HGET', key, field)
      if #value < {MOST_OWNERS * NUMBER_BYTES} and not named(value, number) then
        done = redis.pcall('HSET', key, field, value .. number)
      end
    end
    if type(done) == 'table' and done.err then
      if not string.find(done.err, 'OOM', 1, true) then return done end
      full = 1
      break
    end
  end
end
for at = 1, #records, {RECORD_BYTES} do
  if string.byte(records, at) == 82 then
    local key, field, number = record(at)
    local value = redis.call('HGET', key, field)
    local found = value and named(value, number)
    if found then
      local rest = string.sub(value, 1, found - 1) .. string.sub(value, found + 4)
      redis.call('HDEL', key, field)
      if rest ~= '' then redis.call('HSET', key, field, rest) end
    end
  end
end
if full == 0 then redis.call('SET', KEYS[1], '', 'EX', {_TAG_SECONDS}) end
return {{fresh, full}}
""",
)

_MEMBERSHIP: Final = """
local function key(name) return KEYS[1] .. ':' .. name end

local function depart(number)
  redis.call('DEL', key('member:' .. number))
  redis.call('HDEL', key('summaries'), number)
  if redis.call('SREM', key('members'), number) == 1 then
    redis.call('HINCRBY', key('version'), 'changes', 1)
    redis.call('HINCRBY', key('version'), 'deaths', 1)
  end
end

local function enter(number, record, lease)
  redis.call('SET', key('member:' .. number), record, 'PX', lease)
  redis.call('SADD', key('members'), number)
  redis.call('HINCRBY', key('version'), 'changes', 1)
  return number
end
"""

JOIN: Final = Script(
    "join",
    _MEMBERSHIP
    + """
-- KEYS[1]: the pool. ARGV: record; lease in ms; number of the membership before, or 0; whether to
-- keep it if it has lapsed and nobody else has it; what names the data that it was of; the highest
-- number known. Returns the number, whether it was kept, and what names these data: those of a
-- database that was emptied are others, and lack whatever was told before.
local record, lease, before, keep = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local last = tonumber(redis.call('GET', key('number')) or '0')
local epoch = redis.call('HGET', key('version'), 'epoch')
local there = redis.call('GET', key('member:' .. before))
local mine = not there or there == record
if mine and keep == '1' and before ~= '0' and epoch == ARGV[5] and tonumber(before) <= last then
  redis.call('HDEL', key('summaries'), before)
  return {enter(tonumber(before), record, lease), 1, epoch}
end
if mine then depart(before) else redis.call('HDEL', key('summaries'), 'nobody') end
-- Numbers of a database that was lost must not come again: each is above all that anybody who joins
-- knows of, and above the seconds at which the first of its database was given.
local number = math.max(last, tonumber(ARGV[6])) + 1
if last == 0 then number = math.max(number, tonumber(redis.call('TIME')[1])) end
redis.call('SET', key('number'), string.format('%.0f', number))
if not epoch then
  epoch = table.concat(redis.call('TIME'), '.')
  redis.call('HSET', key('version'), 'epoch', epoch)
end
return {enter(number, record, lease), 0, epoch}
""",
)

BEAT: Final = Script(
    "beat",
    _MEMBERSHIP
    + """
-- KEYS[1]: the pool. ARGV: number; record; lease in ms; summary.
-- Returns nothing where the membership has lapsed, else how often members came or went, went, and
-- how many of those that went have been swept.
local number = ARGV[1]
if redis.call('GET', key('member:' .. number)) ~= ARGV[2] then return {} end
redis.call('PEXPIRE', key('member:' .. number), ARGV[3])
if redis.call('SADD', key('members'), number) == 1 then
  redis.call('HINCRBY', key('version'), 'changes', 1)
end
redis.call('HSET', key('summaries'), number, ARGV[4])
local version = redis.call('HMGET', key('version'), 'changes', 'deaths', 'swept')
return {tonumber(version[1] or 0), tonumber(version[2] or 0), tonumber(version[3] or 0)}
""",
)

ROSTER: Final = Script(
    "roster",
    _MEMBERSHIP
    + f"""
-- KEYS[1]: the pool. ARGV: numbers known, four bytes each; whether to look for the dead and to
-- return summaries. Returns the last number given; all members; records by number of those not
-- known; summaries by number.
local known = {{}}
for at = 1, #ARGV[1], 4 do known[struct.unpack('<I4', ARGV[1], at)] = true end
local members, records = {{}}, {{}}
for _, text in ipairs(redis.call('SMEMBERS', key('members'))) do
  local number, left = tonumber(text), 1
  if ARGV[2] == '1' then left = redis.call('PTTL', key('member:' .. text)) end
  if left == -2 then
    depart(text)
  else
    if left > {MOST_LEASE} then redis.call('PEXPIRE', key('member:' .. text), {MOST_LEASE}) end
    members[#members + 1] = number
    if not known[number] then
      records[#records + 1] = number
      records[#records + 1] = redis.call('GET', key('member:' .. text)) or ''
    end
  end
end
local summaries = {{}}
if ARGV[2] == '1' then summaries = redis.call('HGETALL', key('summaries')) end
local last = tonumber(redis.call('GET', key('number')) or '0')
return {{last, members, records, summaries}}
""",
)

LEAVE: Final = Script(
    "leave",
    _MEMBERSHIP
    + """
-- KEYS[1]: the pool. ARGV: number; record.
if redis.call('GET', key('member:' .. ARGV[1])) == ARGV[2] then depart(ARGV[1]) end
return 1
""",
)

CLAIM: Final = Script(
    "claim",
    """
-- KEYS[1]: the pool. ARGV: number of who wants to sweep; how long in ms; how many had gone when it
-- began. Returns whether it may: nobody else does, or has since.
local key = KEYS[1] .. ':sweep'
if redis.call('HGET', KEYS[1] .. ':version', 'swept') == ARGV[3] then return 0 end
local holder = redis.call('GET', key)
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
return 1
""",
)

SWEPT: Final = Script(
    "swept",
    """
-- KEYS[1]: the pool. ARGV: number of who swept; how many had gone when it began.
if redis.call('GET', KEYS[1] .. ':sweep') == ARGV[1] then redis.call('DEL', KEYS[1] .. ':sweep') end
return redis.call('HSET', KEYS[1] .. ':version', 'swept', ARGV[2])
""",
)

SWEEP: Final = Script(
    "sweep",
    _COMMON
    + f"""
-- KEYS[1]: a bucket. ARGV: live members; the last number given when they were read; cursor.
-- Returns the next cursor and how many locations were taken away.
local live, last, gone = ARGV[1], tonumber(ARGV[2]), 0
local page = redis.call('HSCAN', KEYS[1], ARGV[3], 'COUNT', 512)
for at = 1, #page[2], 2 do
  local field, value, kept = page[2][at], page[2][at + 1], ''
  for from = 1, #value - 3, {NUMBER_BYTES} do
    local number = string.sub(value, from, from + 3)
    if struct.unpack('<I4', number) > last or named(live, number) then kept = kept .. number end
  end
  if kept ~= value then
    gone = gone + (#value - #kept) / {NUMBER_BYTES}
    redis.call('HDEL', KEYS[1], field)
    if kept ~= '' then redis.call('HSET', KEYS[1], field, kept) end
  end
end
return {{page[1], gone}}
""",
)
