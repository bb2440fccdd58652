"""The streams of one client, and the events that come for them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from headrace.client.door import Response
from headrace.client.stream import Stream
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import Conflict
from headrace.protocol.jobs import EnvelopeError

log = get_logger()


class Inbox:
    """Open streams by request_id. One that its user has dropped is gone: it needs no more events."""

    def __init__(self) -> None:
        self._streams: WeakValueDictionary[str, Stream[Response]] = WeakValueDictionary()

    def open(self, stream: Stream[Response]) -> None:
        """From now on events find the stream. Raises Conflict if its request_id is under way here."""
        if stream.request_id in self._streams:
            message = f"request_id: {stream.request_id!r} is under way in this client."
            raise Conflict(message, param="request_id")
        self._streams[stream.request_id] = stream

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def streams(self) -> Sequence[Stream[Response]]:
        """Those that are open at this moment."""
        return list(self._streams.values())

    def hear(self, body: bytes, now: float) -> None:
        """Hands a message's events to their streams; ``now`` is a monotonic clock."""
        try:
            events = jobs.decode_events(body)
        except EnvelopeError as error:
            log.warning("event.unreadable", error=str(error))
            return
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.accept(event, now)
                if stream.settled:
                    self.close(event.request_id)
