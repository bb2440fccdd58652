"""Chunk events on their way out: packed, so that one message carries many. A message costs ten times a chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from headrace.broker.ports import TopicMessage
from headrace.protocol import jobs
from headrace.protocol.jobs import Job

PACK_BYTES: Final = 128 * 1024


class _Address(NamedTuple):
    """Who reads the pack. A client without a topic of its own reads by hand: its packs stay within one request."""

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
        self._full: list[TopicMessage] = []

    def add(self, job: Job, kind: str, events: Iterable[bytes], topic: str | None) -> None:
        """Adds events of a job, to be told under the topic."""
        address = _Address(job.client, kind, topic, job.request_id if topic is None else "")
        pack = self._packs.get(address) or self._packs.setdefault(address, _Pack())
        for event in events:
            pack.events.append(event)
            pack.size += len(event)
            if pack.size > PACK_BYTES:
                self._full.append(_message(address, pack.events))
                pack.events, pack.size = [], 0

    def take(self) -> list[TopicMessage]:
        """Everything that was added, as messages; the outbox is empty after it."""
        messages = self._full + [_message(to, pack.events) for to, pack in self._packs.items() if pack.events]
        self._full, self._packs = [], {}
        return messages


def singly(messages: Iterable[TopicMessage]) -> list[TopicMessage]:
    """The same events in the same order, each in a message of its own."""
    return [replace(to, body=jobs.encode(event)) for to in messages for event in jobs.decode_events(to.body)]


def _message(address: _Address, events: list[bytes]) -> TopicMessage:
    key = jobs.routing_key(address.client, address.kind, address.topic)
    return TopicMessage(key, jobs.pack(events), request_id=address.request_id)
