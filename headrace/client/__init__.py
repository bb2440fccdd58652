"""The SDK: submit requests, read their streams, map over many of them."""

from headrace.client.door import Request
from headrace.client.headrace import Broken, Headrace
from headrace.client.many import Done
from headrace.client.stream import Chunk, Stream

__all__ = ["Broken", "Chunk", "Done", "Headrace", "Request", "Stream"]
