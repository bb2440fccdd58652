"""The files of a batch: results and errors, one line each, appended; and what makes a killed run go on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import IO, Final, Self

import msgspec
from msgspec import Struct

from headrace.batch.lines import Row, encode_row, refused_id

_BLOCK: Final = 1 << 16


class LedgerError(Exception):
    """The files cannot be used as they are: names the file and what to do."""


class Met(IntFlag):
    """When a line was met."""

    NEVER = 0
    DONE = 1
    """It has its row: from this run or an earlier one."""
    READ = 2
    """It was read in this pass over the input."""


class _Lines:
    """Which lines were met. On disk, so that memory stays flat over millions of them."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("CREATE TABLE met (line BLOB PRIMARY KEY, how INTEGER NOT NULL) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def mark(self, line: str, how: Met) -> Met:
        """Adds ``how`` to what is known of a line; returns what was known."""
        key = hashlib.blake2b(line.encode(), digest_size=16).digest()
        found = self._db.execute("SELECT how FROM met WHERE line = ?", (key,)).fetchone()
        before = Met(found[0]) if found else Met.NEVER
        if how not in before:
            self._db.execute("INSERT OR REPLACE INTO met VALUES (?, ?)", (key, before | how))
        return before

    def close(self) -> None:
        self._db.close()


class _Told(Struct):
    """What a row says of the line that it is for."""

    id: str = ""
    custom_id: str | None = None
    error: _Place | None = None


class _Place(Struct):
    line: int | None = None


_read_row = msgspec.json.Decoder(_Told).decode


@dataclass(slots=True)
class Ledger:
    """Who has a row, and where rows go. ``batch`` names the batch until every line of its input has a row.

    A row stands for a line by custom_id; that of a refused line by its number and by what stands in it.
    """

    batch: str
    done_before: int
    failed_before: int
    _run_file: Path
    _lock: IO[str]
    _out: IO[bytes]
    _errors: IO[bytes]
    _lines: _Lines
    _begun: bool = False

    @classmethod
    @contextmanager
    def opened(cls, out: Path, errors: Path) -> Iterator[Self]:
        """Opens the files, cuts a torn last line off, reads who is done. Raises LedgerError."""
        for file in (out, errors):
            if file.exists() and not file.is_file():
                raise LedgerError(f"{file} is not a regular file: a batch reads its rows again to go on.")
            if not file.parent.is_dir():
                raise LedgerError(f"{file.parent} is not a folder.")
        run_file = out.with_name(out.name + ".run")
        with run_file.open("a+") as lock:
            _take(lock, run_file)
            lines = _Lines()
            try:
                answered, failed = _recover_all((out, errors), lines, run_file)
                with out.open("ab", buffering=0) as results, errors.open("ab", buffering=0) as refusals:
                    ledger = cls(_batch_of(lock), answered + failed, failed, run_file, lock, results, refusals, lines)
                    try:
                        yield ledger
                    finally:
                        ledger._leave_no_empty_files()
            finally:
                lines.close()

    def refusal_is_known(self, number: int, text: bytes) -> bool:
        """Whether the line with this number was refused before, as it stands."""
        return Met.DONE in self._lines.mark(_refused(number, refused_id(text)), Met.NEVER)

    def meet(self, custom_id: str) -> Met:
        """Notes that a line with this custom_id was read; returns what was known of it."""
        self._begun = True
        return self._lines.mark(_named(custom_id), Met.READ)

    def write(self, row: Row) -> None:
        """Appends a row to its file: results where the status is 200, else errors. Raises LedgerError."""
        answered = row.response is not None and row.response.status_code == 200
        text = encode_row(row)
        file = self._out if answered else self._errors
        with _writing(file):
            written = file.write(text)
            while written < len(text):
                written += file.write(text[written:])

    def finish(self) -> None:
        """Every line has its row: the next run with these files is another batch. Raises LedgerError."""
        self._begun = True
        for file in (self._out, self._errors):
            with _writing(file):
                os.fsync(file.fileno())
        self._run_file.unlink(missing_ok=True)
        if self._errors.tell() == 0:
            Path(self._errors.name).unlink(missing_ok=True)

    def _leave_no_empty_files(self) -> None:
        """A batch that never came to its first line leaves nothing behind: no request of it is under way."""
        if self._begun or self._out.tell() or self._errors.tell():
            return
        for file in (self._out, self._errors):
            Path(file.name).unlink(missing_ok=True)
        self._run_file.unlink(missing_ok=True)


@contextmanager
def _writing(file: IO[bytes]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(f"{file.name}: {error.strerror}. Make it writable and run the same command again.") from error


def _take(lock: IO[str], run_file: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(f"Another process is writing this batch: it holds {run_file}.") from None
    if not run_file.exists() or not os.path.samestat(os.fstat(lock.fileno()), run_file.stat()):
        raise LedgerError("Another process has just finished this batch: start again.")


def _batch_of(lock: IO[str]) -> str:
    """The name of the batch: that of the run that was killed, else a new one."""
    lock.seek(0)
    name = lock.read().strip()
    if not name:
        name = f"batch-{secrets.token_hex(12)}"
        lock.seek(0)
        lock.write(name + "\n")
        lock.flush()
        os.fsync(lock.fileno())
    return name


def _recover_all(files: tuple[Path, Path], lines: _Lines, run_file: Path) -> tuple[int, int]:
    try:
        return _recover(files[0], lines), _recover(files[1], lines)
    except LedgerError:
        if run_file.stat().st_size == 0:  # no batch was ever here: leave nothing behind
            run_file.unlink()
        raise


def _recover(file: Path, lines: _Lines) -> int:
    """Notes who has a row in the file; returns how many rows there are."""
    if not file.exists():
        return 0
    _cut_torn_line(file)
    count = 0
    with file.open("rb") as rows:
        for text in rows:
            count += 1
            try:
                told = _read_row(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise LedgerError(f"{file}: line {count} is not the row of a batch; name another file.") from None
            if told.error is not None and told.error.line is not None:
                lines.mark(_refused(told.error.line, told.id), Met.DONE)
            elif told.custom_id is not None:
                lines.mark(_named(told.custom_id), Met.DONE)
    return count


def _cut_torn_line(file: Path) -> None:
    """A row ends with its newline; what comes after the last one was cut off by a crash."""
    with file.open("r+b") as rows:
        size = end = rows.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            rows.seek(start)
            newline = rows.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            rows.truncate(end)


def _refused(number: int, row: str) -> str:
    return f"line {number} {row}"


def _named(custom_id: str) -> str:
    return f"custom_id {custom_id}"
