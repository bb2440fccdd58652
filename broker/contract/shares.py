"""What a RunStore promises besides the runs: bodies, what a client has under way, what workers report, its own room.

Part of ``RunStoreContract``.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Final

from headrace.broker.contract.stores import Stores, StoresContract, a_run, a_worker
from headrace.broker.ports import Allowance

NAMES: Final = ("plain", "org/model-7B:v1", "a {b} c", "*", "\0", "é" * 100, "'\"\n")
"""A model may have any name."""


def a_client() -> str:
    """A client that no other test knows."""
    return f"client-{uuid.uuid4().hex[:12]}"


async def enter(
    stores: Stores, client: str, run: str, tokens: int = 1, *, lasts: float = 60.0, allowance: Allowance
) -> str | None:
    """Enters a run that counts for ``lasts`` seconds."""
    return await stores.runs.enter(client, run, tokens, await stores.now() + lasts, allowance)


class SharesContract(StoresContract):
    """What is kept for others than one run's holder."""

    # ------------------------------------------------------------------------------------------------ bodies

    async def test_a_body_is_kept_as_it_is_until_it_is_dropped(self) -> None:
        run, body = a_run(), bytes(range(256)) * 20_000
        async with self.connect() as stores, self.connect() as others:
            assert await stores.runs.get_body(run, "job") is None
            await stores.runs.put_body(run, "job", body, 60.0)
            assert await others.runs.get_body(run, "job") == body
            for _ in range(2):
                await others.runs.drop_body(run, "job")
                assert await stores.runs.get_body(run, "job") is None
            await stores.runs.put_body(run, "job", b"another", None)
            assert await others.runs.get_body(run, "job") == b"another"

    async def test_bodies_are_told_apart_by_run_and_name(self) -> None:
        one, two = a_run(), a_run()
        async with self.connect() as stores:
            places = [(run, name) for run in (one, two) for name in ("render", "generate")]
            for run, name in places:
                await stores.runs.put_body(run, name, f"{run} {name}".encode(), 60.0)
            await stores.runs.drop_body(one, "render")
            assert [await stores.runs.get_body(run, name) for run, name in places] == [
                None,
                *(f"{run} {name}".encode() for run, name in places[1:]),
            ]

    async def test_a_body_that_is_kept_already_stays(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            for ttl in (60.0, 60.0, None):
                await stores.runs.put_body(run, "job", b"%r" % ttl, ttl)
            assert await stores.runs.get_body(run, "job") == b"60.0"

    async def test_the_time_of_a_body_is_prolonged_and_never_shortened(self) -> None:
        brief, prolonged, not_shortened, for_good, still_for_good = (a_run() for _ in range(5))
        asked: dict[str, tuple[float | None, ...]] = {
            brief: (0.2,),
            prolonged: (0.2, 60.0),
            not_shortened: (60.0, 0.2),
            for_good: (0.2, None),
            still_for_good: (None, 0.2),
        }
        async with self.connect() as stores:
            for run, ttls in asked.items():
                for ttl in ttls:
                    await stores.runs.put_body(run, "job", b"{}", ttl)
            await stores.elapse(0.25)
            kept = {run: await stores.runs.get_body(run, "job") for run in asked}
            assert kept == {**dict.fromkeys(asked, b"{}"), brief: None}
            await stores.runs.put_body(brief, "job", b"[]", 60.0)
            assert await stores.runs.get_body(brief, "job") == b"[]"

    # ------------------------------------------------------------------------------------------------ under way

    async def test_a_client_has_so_many_requests_under_way_and_no_more(self) -> None:
        client, runs, allowance = a_client(), [a_run() for _ in range(3)], Allowance(requests=2)
        async with self.connect() as stores, self.connect() as others:
            assert await enter(stores, client, runs[0], allowance=allowance) is None
            assert await enter(others, client, runs[1], allowance=allowance) is None
            full = f"client '{client}' has 2 requests under way, its limit is 2"
            assert await enter(stores, client, runs[2], allowance=allowance) == full
            assert await enter(others, a_client(), runs[2], allowance=allowance) is None
            await others.runs.leave(client, runs[0])
            assert await enter(stores, client, runs[2], allowance=allowance) is None
            assert await enter(stores, client, runs[0], allowance=allowance) == full

    async def test_a_client_has_so_many_tokens_under_way_and_no_more(self) -> None:
        client, one, two, allowance = a_client(), a_run(), a_run(), Allowance(tokens=100)
        async with self.connect() as stores:
            assert await enter(stores, client, one, 60, allowance=allowance) is None
            refused = await enter(stores, client, two, 41, allowance=allowance)
            assert refused == f"client '{client}' has 60 tokens under way and asks for 41, its limit is 100"
            assert await enter(stores, client, two, 40, allowance=allowance) is None
            await stores.runs.leave(client, one)
            assert await enter(stores, client, one, 61, allowance=allowance) is not None
            assert await enter(stores, client, one, 60, allowance=allowance) is None

    async def test_zero_is_no_limit(self) -> None:
        client = a_client()
        async with self.connect() as stores:
            for _ in range(20):
                assert await enter(stores, client, a_run(), 1_000_000, allowance=Allowance()) is None
            assert await enter(stores, client, a_run(), 7, allowance=Allowance(requests=20)) is not None
            assert await enter(stores, client, a_run(), 7, allowance=Allowance(tokens=20_000_006)) is not None
            assert await enter(stores, client, a_run(), 7, allowance=Allowance(tokens=20_000_007)) is None

    async def test_entering_again_changes_nothing(self) -> None:
        client, run, other, allowance = a_client(), a_run(), a_run(), Allowance(requests=2, tokens=10)
        async with self.connect() as stores:
            assert await enter(stores, client, run, 4, lasts=0.3, allowance=allowance) is None
            for _ in range(3):
                assert await enter(stores, client, run, 9, allowance=allowance) is None
            assert await enter(stores, client, other, 6, lasts=0.3, allowance=allowance) is None
            assert await enter(stores, client, run, allowance=Allowance(requests=1, tokens=1)) is None
            await stores.elapse(0.35)
            assert await enter(stores, client, a_run(), 10, allowance=allowance) is None

    async def test_who_was_refused_is_not_counted(self) -> None:
        client, run, allowance = a_client(), a_run(), Allowance(requests=1, tokens=10)
        async with self.connect() as stores:
            assert await enter(stores, client, a_run(), 11, allowance=allowance) is not None
            assert await enter(stores, client, run, 10, allowance=allowance) is None
            assert await enter(stores, client, a_run(), 1, allowance=allowance) is not None
            await stores.runs.leave(client, run)
            assert await enter(stores, client, a_run(), 10, allowance=allowance) is None

    async def test_a_run_leaves_once_and_one_that_never_entered_leaves_nothing(self) -> None:
        client, runs, allowance = a_client(), [a_run() for _ in range(4)], Allowance(requests=2, tokens=4)
        async with self.connect() as stores:
            await stores.runs.leave(client, runs[0])
            for run in runs[:2]:
                assert await enter(stores, client, run, 2, allowance=allowance) is None
            await stores.runs.leave(client, runs[2])
            await stores.runs.leave(a_client(), runs[0])
            for _ in range(3):
                await stores.runs.leave(client, runs[0])
            assert await enter(stores, client, runs[2], 2, allowance=allowance) is None
            assert await enter(stores, client, runs[3], 2, allowance=allowance) is not None

    async def test_a_run_that_nobody_lets_leave_leaves_by_itself(self) -> None:
        client, allowance = a_client(), Allowance(requests=2, tokens=10)
        async with self.connect() as stores:
            assert await enter(stores, client, a_run(), 3, lasts=0.2, allowance=allowance) is None
            assert await enter(stores, client, a_run(), 7, lasts=60, allowance=allowance) is None
            assert await enter(stores, client, a_run(), 3, allowance=allowance) is not None
            await stores.elapse(0.25)
            assert await enter(stores, client, a_run(), 4, allowance=allowance) is not None
            assert await enter(stores, client, a_run(), 3, allowance=allowance) is None

    async def test_of_many_who_enter_at_once_as_many_get_in_as_may(self) -> None:
        client, allowance = a_client(), Allowance(requests=5, tokens=1000)
        async with self.connect() as one, self.connect() as two:
            told = await asyncio.gather(
                *(enter(stores, client, a_run(), 10, allowance=allowance) for stores in (one, two) * 10)
            )
            assert told.count(None) == 5

    # ------------------------------------------------------------------------------------------------ reports

    async def test_a_model_has_the_last_word_of_each_of_its_workers(self) -> None:
        one, two, model = a_worker(), a_worker(), a_client()
        async with self.connect() as stores, self.connect() as others:
            assert await stores.runs.reports(model) == {}
            await stores.runs.report(model, one, b'{"lag":1}', 60.0)
            await others.runs.report(model, two, b'{"lag":2,"\x00":"\xff"}', 60.0)
            await stores.runs.report(model, one, b'{"lag":3}', 60.0)
            assert await others.runs.reports(model) == {one: b'{"lag":3}', two: b'{"lag":2,"\x00":"\xff"}'}

    async def test_models_are_told_apart_whatever_they_are_called(self) -> None:
        worker, prefix = a_worker(), a_client()
        async with self.connect() as stores:
            for n, name in enumerate(NAMES):
                await stores.runs.report(prefix + name, worker, b"%d" % n, 60.0)
            said = [await stores.runs.reports(prefix + name) for name in NAMES]
            assert said == [{worker: b"%d" % n} for n in range(len(NAMES))]

    async def test_each_word_counts_for_its_own_time(self) -> None:
        brief, renewed, shortened, lasting = (a_worker() for _ in range(4))
        model = a_client()
        times = {brief: (0.3,), renewed: (0.3, 60.0), shortened: (60.0, 0.3), lasting: (60.0,)}
        async with self.connect() as stores:
            for worker, spans in times.items():
                for span in spans:
                    await stores.runs.report(model, worker, b"%d" % span, span)
            await stores.elapse(0.35)
            assert await stores.runs.reports(model) == {renewed: b"60", lasting: b"60"}

    # ------------------------------------------------------------------------------------------------ room

    async def test_the_share_of_the_memory_that_is_in_use_is_a_share(self) -> None:
        async with self.connect() as stores:
            assert 0 <= await stores.runs.memory() < 1
