"""Chunk events on their way out: packed, so that one message carries many. A message costs ten times a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from headrace.broker.ports import TopicMessage
from headrace.protocol import jobs
from headrace.protocol.jobs import Identity, Via
from headrace.workers.outcome import Recipient

PACK_BYTES: Final = 128 * 1024


class _Address(NamedTuple):
    """Who reads the pack. A client without a topic of its own reads by hand: its packs stay within one request."""

    via: Via
    client: str
    kind: str
    topic: str | None
    request_id: str


class _Pack:
    """Events for one address, and how many bytes they are."""

    __slots__ = ("events", "size")

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.size = 0


class Outbox:
    """Collects events; gives them out as messages, in order."""

    def __init__(self) -> None:
        self._packs: dict[_Address, _Pack] = {}
        self._full: dict[Via, list[TopicMessage]] = {}

    def add(self, request: Identity, kind: str, events: Sequence[bytes], to: Recipient) -> None:
        """Adds events of a request, to be told as the recipient asks."""
        topic = to.topic
        address = _Address(to.via, request.client, kind, topic, request.request_id if topic is None else "")
        pack = self._packs.get(address)
        if pack is None:
            pack = self._packs[address] = _Pack()
        size = sum(map(len, events))
        if pack.size + size <= PACK_BYTES:
            pack.events += events
            pack.size += size
            return
        for event in events:
            pack.events.append(event)
            pack.size += len(event)
            if pack.size > PACK_BYTES:
                self._close(address, pack)

    def take(self) -> dict[Via, list[TopicMessage]]:
        """Everything that was added, as messages, by the way that they take; the outbox is empty after it."""
        for address, pack in self._packs.items():
            if pack.events:
                self._close(address, pack)
        messages, self._full, self._packs = self._full, {}, {}
        return messages

    def _close(self, to: _Address, pack: _Pack) -> None:
        key = jobs.routing_key(to.client, to.kind, to.topic)
        message = TopicMessage(key, jobs.pack(pack.events), request_id=to.request_id)
        self._full.setdefault(to.via, []).append(message)
        pack.events, pack.size = [], 0


def singly(messages: Iterable[TopicMessage]) -> list[TopicMessage]:
    """The same events in the same order, each in a message of its own."""
    return [replace(to, body=jobs.encode(event)) for to in messages for event in jobs.decode_events(to.body)]
