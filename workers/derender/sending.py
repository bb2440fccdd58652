"""Messages to clients, sent by the way that each has chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.broker.ports import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    ClientTopics,
    MessageTooLarge,
    TopicMessage,
)
from headrace.logs import get_logger
from headrace.protocol.jobs import Via
from headrace.workers.derender.outbox import singly
from headrace.workers.outcome import parts_of

log = get_logger()

Messages = Mapping[Via, Sequence[TopicMessage]]


async def send(broker: Broker, messages: Messages) -> None:
    """Publishes; where a pack is too large, event by event, and an event that is too large by itself in parts."""
    for via, theirs in messages.items():
        await _send(broker.via(via), theirs)


async def insist(broker: Broker, messages: Messages, *, pause: float) -> None:
    """Until they are out: what is told later must not overtake them. ``pause`` is in seconds, between two tries.

    A way that is closed at the moment does not hold up those who have chosen the other, for this once.
    """
    match list(messages.items()):
        case []:
            pass
        case [(via, theirs)]:
            await _insist(broker.via(via), theirs, pause)
        case ways:
            await asyncio.gather(*(_insist(broker.via(via), theirs, pause) for via, theirs in ways))


async def _insist(topics: ClientTopics, messages: Sequence[TopicMessage], pause: float) -> None:
    while True:
        try:
            await _send(topics, messages)
            return
        except BrokerUnavailable as away:
            log.warning("topics.away", messages=len(messages), error=str(away))
            await asyncio.sleep(pause)
        except BrokerError as refused:  # it would be refused again, and the others wait
            log.error("events.refused", messages=len(messages), error=str(refused))
            return


async def _send(topics: ClientTopics, messages: Sequence[TopicMessage]) -> None:
    try:
        await topics.publish(messages)
        return
    except MessageTooLarge:
        pass
    for message in singly(messages):
        try:
            await topics.publish([message])
        except MessageTooLarge as over:
            await topics.publish([replace(message, body=part) for part in parts_of(message.body, over.limit)])
