"""Runs a batch: lines in, rows out, each line once, whatever is killed on the way."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from headrace.batch.ledger import Ledger, Met
from headrace.batch.lines import Line, Refused, Row, duplicate, read_line, too_long
from headrace.batch.tally import Tally, output_tokens
from headrace.client import Headrace
from headrace.client.door import Request
from headrace.client.many import Done
from headrace.settings import Settings

DRAIN_S: Final = 10.0
"""Seconds that lines under way have to end once the batch is asked to stop."""
_AROUND_BODY: Final = 1 << 16
"""Bytes of a line that are not its body."""
_BREATH: Final = 200
"""Lines after which the event loop gets a turn, where none of them has to be sent."""


@dataclass(slots=True)
class Batch:
    """One run over an input file. ``told`` is called after each row."""

    source: Path
    ledger: Ledger
    settings: Settings
    tally: Tally
    max_in_flight: int
    told: Callable[[], None] = lambda: None
    _read_all: bool = False

    async def run(self, hr: Headrace, stop: asyncio.Event) -> bool:
        """Sends what has no row yet; True once every line has one.

        When ``stop`` is set no further line is sent and those under way have DRAIN_S seconds: False, unless that was
        all. The same files then take the batch up where it was.
        """
        try:
            async with (
                _bounded_once(stop, DRAIN_S),
                aclosing(self._requests(stop)) as requests,
                aclosing(self._ends(hr, requests)) as ends,
            ):
                async for done in ends:
                    self._end(done)
        except TimeoutError:
            return False
        if self._read_all:
            self.ledger.finish()
        return self._read_all

    def _ends(self, hr: Headrace, requests: AsyncIterator[Request]) -> AsyncGenerator[Done, None]:
        return hr.map(
            requests,
            max_in_flight=self.max_in_flight,
            attempts=self.settings.batch_attempts,
            replay_ttl=self.settings.batch_replay_ttl,
        )

    async def _requests(self, stop: asyncio.Event) -> AsyncGenerator[Request, None]:
        with self.source.open("rb") as file:
            for number, text in _lines(file, self.settings.max_request_bytes + _AROUND_BODY):
                if stop.is_set():
                    return
                request = self._request(number, text)
                if request is not None:
                    yield request
                elif number % _BREATH == 0:
                    await asyncio.sleep(0)
        self._read_all = True

    def _request(self, number: int, text: bytes | None) -> Request | None:
        """What the line asks; None if it has its row, which a refused one is given here."""
        if self.ledger.refusal_is_known(number, text or b""):
            self.tally.size += len(text or b"")
            return None
        try:
            if text is None:
                raise too_long(self.settings.max_request_bytes)
            line = read_line(text, number)
            met = self.ledger.meet(line.custom_id)
            if Met.READ in met:
                raise duplicate(line)
        except Refused as refused:
            self._write(refused.row(number, text or b""), len(text or b""))
            self.tally.failures[refused.refusal.code] += 1
            return None
        if Met.DONE in met:
            self.tally.size += line.size
            return None
        return line.request(self.ledger.batch)

    def _end(self, done: Done) -> None:
        line = done.request.key
        assert isinstance(line, Line)
        if done.final is not None:
            self.tally.answered += 1
            self.tally.tokens += output_tokens(done.final.response)
            self._write(line.answered(done.request_id, done.final.response), line.size)
        elif done.error is not None:
            self.tally.failures[done.error.error.error.type] += 1
            self._write(line.failed(done.request_id, done.error), line.size)

    def _write(self, row: Row, size: int) -> None:
        self.ledger.write(row)
        self.tally.size += size
        self.told()


def _lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank with their numbers from 1; None for one of more than ``most`` bytes."""
    number = 0
    while text := file.readline(most + 1):
        number += 1
        if len(text) > most:
            while text and not text.endswith(b"\n"):
                text = file.readline(most)
            yield number, None
            continue
        text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
        if text.strip():
            yield number, text


@asynccontextmanager
async def _bounded_once(stop: asyncio.Event, seconds: float) -> AsyncIterator[None]:
    """Ends the block with TimeoutError ``seconds`` after ``stop`` is set."""
    async with asyncio.timeout(None) as bound:

        async def bind() -> None:
            await stop.wait()
            bound.reschedule(asyncio.get_running_loop().time() + seconds)

        binding = asyncio.create_task(bind())
        try:
            yield
        finally:
            binding.cancel()
