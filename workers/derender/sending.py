"""Messages to clients, sent by the way that each has chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

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

log = get_logger()

Messages = Mapping[Via, Sequence[TopicMessage]]


async def send(broker: Broker, messages: Messages) -> None:
    """Publishes; where a pack is too large, event by event. Raises MessageTooLarge once all that can be out are."""
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
        except MessageTooLarge as over:  # whoever misses the chunk asks for it, and is told why it does not come
            log.error("event.too_large", error=str(over))
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
        over: MessageTooLarge | None = None
    for message in singly(messages):
        try:
            await topics.publish([message])
        except MessageTooLarge as error:
            over = error
    if over is not None:
        raise over
