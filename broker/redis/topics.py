"""ClientTopics on Redis: a bounded stream for each subscription.

All that is kept of a client carries its name as the tag: ``<prefix>:{c:<client>}:subscriptions``, a hash that says who
listens to what, and ``<prefix>:{c:<client>}:events:<subscription>``, a stream for each of them. So a client is one
cluster slot and one ACL pattern, and no name that it chooses reaches another's. A message is added to the streams that
want it by one script and to none where nobody listens; a reader lets go of what it has read, so a stream holds its
reader's backlog only. A subscription lives on a lease: that of a process that died is gone soon.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Self, TypeAlias, cast

from headrace.broker.ports import BrokerError, BrokerUnavailable, MessageTooLarge, TopicMessage, TopologyDrift
from headrace.broker.redis.keys import Keys
from headrace.broker.redis.line import Address, Line
from headrace.broker.redis.scripts import TOPICS_KEEP, TOPICS_OPEN, TOPICS_TELL, Argument, command
from headrace.logs import get_logger

log = get_logger()

LEASE_S: Final = 30.0
"""How long a process's own subscription outlives its last sign of life."""
NAMED_LEASE_S: Final = 7 * 24 * 3600.0
"""How long a named one waits for its client to come back."""
_RENEWALS: Final = 3
"""Signs of life in a lease."""
_IN_HAND: Final = 64
"""Messages that a reader fetches at once."""
_WAIT_S: Final = 1.0
"""How long one read waits at the server: one that died without a word is noticed that soon."""
_TOGETHER: Final = 128
"""Messages that one call of the script adds: the server does nothing else meanwhile."""
_CLOSE_S: Final = 1.0
_CLIENT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Read: TypeAlias = "list[tuple[bytes, list[tuple[bytes, list[bytes]]]]] | None"
"""What XREAD answers: key, entries; of each its id and its fields, name after value."""


class RedisTopics:
    """The ClientTopics of ports, on Redis. The first word of a pattern is the client's name, without a wildcard."""

    def __init__(
        self, address: Address, line: Line, keys: Keys, *, reply_timeout: float, patience: float, max_body: int
    ) -> None:
        self._address = address
        self._line = line
        self._keys = keys
        self._reply_timeout = reply_timeout
        self._patience = patience
        self._max_body = max_body
        self.unheard = 0
        """Durable messages that nobody subscribed to."""

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        """Sends them in order, in one round trip; all of them are confirmed. Raises MessageTooLarge, sending none."""
        by_client: dict[str, list[TopicMessage]] = {}
        for message in messages:
            if len(message.body) > self._max_body:
                raise MessageTooLarge(
                    f"body: {len(message.body)} bytes are over the limit of {self._max_body}", self._max_body
                )
            by_client.setdefault(message.key.partition(".")[0], []).append(message)
        calls = [
            self._tell(client, theirs[start : start + _TOGETHER])
            for client, theirs in by_client.items()
            for start in range(0, len(theirs), _TOGETHER)
        ]
        if calls:
            self.unheard += sum(cast("list[int]", await self._line.ask(calls)))

    def _tell(self, client: str, messages: Sequence[TopicMessage]) -> bytes:
        content: list[Argument] = []
        for message in messages:
            content += (message.key, message.body, message.request_id, int(message.durable))
        return TOPICS_TELL.call((self._keys.subscriptions(client),), self._keys.events(client, ""), *content)

    async def flush(self) -> None:
        """Nothing is under way: publish waits for the server."""

    @asynccontextmanager
    async def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        """A name subscribed to again under another pattern listens to both; two readers of one name share its messages,
        some of which both may hear. A named subscription is kept for a week after it was last read."""
        client = pattern.partition(".")[0]
        if limit < 2:
            raise ValueError(f"limit: {limit} is less than 2 messages")
        if not _CLIENT.fullmatch(client) or " " in pattern:
            raise ValueError(f"pattern: {pattern!r} does not begin with the name of a client")
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(f"name: {name!r} is not 1 to 128 of A-Z a-z 0-9 _ . : -")
        reading = Line(self._address, reply_timeout=self._reply_timeout, patience=self._patience)
        subscription = _Subscription(self._line, reading, self._keys, client, pattern, name, limit)
        await subscription.open()
        renewing = asyncio.create_task(subscription.renew_on(), name=f"subscription {pattern}")
        try:
            yield subscription
            await subscription.settle()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await subscription.close()


class _Subscription:
    """Gives out messages. A named one lets go of a message when the next is asked for; the other when it is read."""

    def __init__(
        self, line: Line, reading: Line, keys: Keys, client: str, pattern: str, name: str | None, limit: int
    ) -> None:
        self._line = line
        self._reading = reading
        self._named = name is not None
        self._name = name if name is not None else f"~{secrets.token_hex(8)}"
        self._keys = (keys.subscriptions(client), keys.events(client, self._name))
        self._pattern = pattern
        self._in_hand = min(_IN_HAND, limit // 2)
        self._limit = limit - self._in_hand
        self._lease = NAMED_LEASE_S if self._named else LEASE_S
        self._after = b"0"
        self._given: bytes | None = None
        self._fetched: deque[tuple[bytes, TopicMessage]] = deque()
        self._fetching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Makes it exist. Raises TopologyDrift where it does under another limit."""
        call = TOPICS_OPEN.call(self._keys, self._name, self._pattern, self._limit, _ms(self._lease))
        (stands,) = cast("list[bytes | None]", await self._line.ask([call]))
        if stands is not None:
            raise TopologyDrift(
                f"subscription {self._name!r} exists with limit = {stands.decode()}, ours is {self._limit}: "
                "use the same limit everywhere, or delete it once it is read"
            )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage:
        if self._named and self._given is not None:
            self._line.post(TOPICS_KEEP.call(self._keys, _ms(self._lease), _following(self._given)))
            self._given = None
        while not self._fetched:
            # A task of its own: who gives up waiting leaves the read at work for whoever waits next.
            fetching = self._fetching = self._fetching or asyncio.create_task(self._fetch(), name=self._pattern)
            await asyncio.wait((fetching,))
            if self._fetching is fetching:
                self._fetching = None
            fetching.result()
        self._given, message = self._fetched.popleft()
        return message

    async def _fetch(self) -> None:
        """Returns when there is something. The server may be away for as long as it likes."""
        while not self._fetched:
            # What was read is told to nobody else, unless this is a name: then it goes once it was settled.
            done = () if self._named or self._after == b"0" else (_following(self._after),)
            keep = TOPICS_KEEP.call(self._keys, _ms(self._lease), *done)
            block = ("BLOCK", int(_WAIT_S * 1000))
            read = command("XREAD", "COUNT", self._in_hand, *block, "STREAMS", self._keys[1], self._after)
            try:
                there, found = await self._reading.ask([keep, read], longer=_WAIT_S)
                if there == 0:
                    await self._open_again()
            except BrokerUnavailable as away:
                log.warning("subscription.away", pattern=self._pattern, error=str(away))
                continue
            for _, entries in cast("Read", found) or ():
                self._fetched.extend((number, _message(fields)) for number, fields in entries)
            if self._fetched:
                self._after = self._fetched[-1][0]

    async def _open_again(self) -> None:
        log.warning("subscription.lost", pattern=self._pattern, subscription=self._name)
        await self.open()
        self._after = b"0"

    async def renew_on(self) -> None:
        """Keeps the lease while the reader is busy with something else."""
        while True:
            await asyncio.sleep(self._lease / _RENEWALS)
            with suppress(BrokerUnavailable):
                await self._line.ask([TOPICS_KEEP.call(self._keys, _ms(self._lease))])

    async def settle(self) -> None:
        """Lets go of the last message of a named subscription."""
        if self._named and self._given is not None:
            with suppress(BrokerUnavailable):  # it is told again
                await self._line.ask([TOPICS_KEEP.call(self._keys, _ms(self._lease), _following(self._given))])

    async def close(self) -> None:
        """Ends the reading. A subscription without a name is deleted; if that fails, its lease runs out."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait((self._fetching,))
        await self._reading.close()
        if not self._named:
            registry, stream = self._keys
            with suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._line.ask([command("HDEL", registry, self._name), command("UNLINK", stream)])


def _message(fields: Sequence[bytes]) -> TopicMessage:
    _, key, _, body, _, request_id, _, durable = fields
    return TopicMessage(key.decode(), body, durable == b"1", request_id.decode())


def _following(entry: bytes) -> bytes:
    """The id right after an entry's."""
    time, _, number = entry.partition(b"-")
    return b"%b-%d" % (time, int(number) + 1)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
