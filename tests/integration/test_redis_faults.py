"""Redis freezes, dies, forgets, refuses, or loses replies: the log and the run store stay true, within bounds."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import pytest
import redis.asyncio

from headrace.broker.contract.stores import a_run, a_worker, answers, append, batch, claim, places, taken, whole
from headrace.broker.entries import Position
from headrace.broker.ports import (
    Allowance,
    Append,
    BrokerError,
    BrokerUnavailable,
    Checkpoint,
    ClaimAnswer,
    ClaimRequest,
    Release,
)
from headrace.broker.redis import connect_redis
from headrace.broker.redis.keys import Keys
from headrace.broker.redis.log import READERS
from tests.contract.worlds import RedisStores
from tests.proxy import Mood, Proxy
from tests.servers import Redis

pytestmark = pytest.mark.servers

T = TypeVar("T")
START = Position(1, 0)
BOUND = 30.0


@asynccontextmanager
async def stores_at(
    url: str, admin_url: str = "", *, reply_timeout: float = 0.3, patience: float = BOUND
) -> AsyncIterator[RedisStores]:
    """Our stores at one address, and redis-py at another (the server's own, past a proxy)."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(admin_url or url, max_connections=4)
    async with (
        connect_redis(url, reply_timeout=reply_timeout, patience=patience) as stores,
        redis.asyncio.Redis.from_pool(pool) as admin,
    ):
        yield RedisStores(admin, Keys(), stores.log, stores.runs)


@asynccontextmanager
async def proxied(server: Redis, **timing: float) -> AsyncIterator[tuple[Proxy, RedisStores]]:
    async with (
        Proxy.to(server.host, server.port) as proxy,
        stores_at(f"redis://127.0.0.1:{proxy.port}/{server.db}", server.url, **timing) as stores,
    ):
        yield proxy, stores


@contextmanager
def frozen(server: Redis) -> Iterator[None]:
    """The server process stands still: its sockets stay open, nothing is answered."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def still_waits(task: "asyncio.Task[object]", seconds: float) -> None:
    done, _ = await asyncio.wait((task,), timeout=seconds)
    assert not done, task


# ----------------------------------------------------------------------------------------------- a frozen server


async def test_an_append_that_meets_a_frozen_server_is_stored_once(private_redis: Redis) -> None:
    run = a_run()
    async with stores_at(private_redis.url) as stores:
        await taken(stores, run, a_worker())
        with frozen(private_redis):
            appending = asyncio.create_task(append(stores, batch(run, START, 1, 2)))
            await still_waits(appending, 0.7)
        assert await appending in {Append.STORED, Append.ALREADY}
        assert await append(stores, batch(run, Position(1, 2), 3)) is Append.STORED
        assert places(await whole(stores, run)) == ["begin 1-0", "chunk 1-1", "chunk 1-2", "chunk 1-3"]


async def test_a_claim_that_meets_a_frozen_server_is_new_once(private_redis: Redis) -> None:
    run, worker = a_run(), a_worker()
    async with stores_at(private_redis.url) as stores:
        lifetime = await stores.now() + 60
        with frozen(private_redis):
            claiming = asyncio.create_task(claim_until(stores, run, worker, lifetime))
            await still_waits(claiming, 0.7)
        assert await claiming == (ClaimAnswer.NEW, 1)
        assert places(await whole(stores, run)) == ["begin 1-0"]


async def claim_until(stores: RedisStores, run: str, worker: str, deadline: float) -> tuple[ClaimAnswer, int]:
    claimed = await stores.runs.claim(ClaimRequest(run, "generate", worker, "d", deadline, 60.0, 30.0))
    return claimed.answer, claimed.epoch


async def test_a_server_frozen_for_longer_than_our_patience_is_unavailable_in_bounded_time(
    private_redis: Redis,
) -> None:
    run = a_run()
    async with stores_at(private_redis.url, patience=0.5) as stores:
        await taken(stores, run, a_worker())
        with frozen(private_redis):
            calls: list[Awaitable[object]] = [
                stores.log.append([batch(run, START, 1)]),
                stores.log.read({run: START}, wait=0),
                stores.log.read({run: START}, wait=0.2),
                stores.log.exists([run]),
                stores.runs.outcome(run, b"done", 60.0),
                stores.runs.beat("worker", [run], 1.0),
            ]
            async with asyncio.timeout(60):  # far above every bound; without one it would not end
                errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [BrokerUnavailable] * len(calls)
        assert await stores.runs.outcome(run, b"done", 60.0) == b"done"


# ----------------------------------------------------------------------------------------------- lost connections


async def test_lost_replies_double_nothing(redis_db: Redis) -> None:
    run, worker = a_run(), a_worker()
    async with proxied(redis_db) as (proxy, stores):

        async def unheard(call: Coroutine[None, None, T]) -> T:
            """The call, of which the first reply is lost."""
            proxy.mood = Mood.FORGETFUL
            proxy.requested.clear()
            calling = asyncio.create_task(call)
            await proxy.requested.wait()
            await stores.admin.ping()  # what was passed on before is done
            proxy.mood = Mood.FAIR
            proxy.cut()
            return await calling

        claimed = await unheard(claim(stores, run, worker))
        assert (claimed.answer, claimed.epoch) == (ClaimAnswer.NEW, 1)
        for k in (1, 2, 3):
            assert await unheard(append(stores, batch(run, Position(1, k - 1), k))) is Append.ALREADY
        await unheard(stores.runs.release(run, "generate", 1, Release.FAILED))
        assert (await claim(stores, run, worker)).attempts == 1
        assert await unheard(stores.runs.outcome(run, b"done", 60.0)) == b"done"
        assert await unheard(stores.runs.refuse(run, "digest", b"no", 60.0)) == b"done"
        unfit, client, until = a_run(), "evals", await stores.now() + 60
        assert await unheard(stores.runs.refuse(unfit, "digest", b"no", 60.0)) == b"no"
        await unheard(stores.runs.reopen(unfit, until, 60.0, fresh=True))
        assert await stores.runs.result(unfit) is None
        both = Allowance(requests=2, tokens=2)
        assert await unheard(stores.runs.enter(client, run, 1, until, both)) is None
        await unheard(stores.runs.leave(client, run))
        assert [await stores.runs.enter(client, a_run(), 1, until, both) for _ in range(2)] == [None, None]
        assert places(await whole(stores, run)) == ["begin 1-0", "chunk 1-1", "chunk 1-2", "chunk 1-3", "begin 2-0"]


async def test_a_server_that_is_gone_without_a_word_is_noticed_and_reached_again(redis_db: Redis) -> None:
    run = a_run()
    async with proxied(redis_db) as (proxy, stores):
        await taken(stores, run, a_worker())
        reading = asyncio.create_task(stores.log.read({run: START}, wait=BOUND))
        await still_waits(reading, 0.05)
        proxy.mood = Mood.DEAF
        appending = asyncio.create_task(append(stores, batch(run, START, 1)))
        await still_waits(appending, 0.5)
        proxy.mood = Mood.FAIR  # for new connections; on the old ones a request is missing
        async with asyncio.timeout(BOUND):
            assert await appending is Append.STORED
            assert places((await reading)[run]) == ["chunk 1-1"]


async def test_connections_killed_again_and_again_lose_and_double_nothing(redis_db: Redis) -> None:
    runs = [a_run() for _ in range(20)]
    async with stores_at(redis_db.url, reply_timeout=2.0) as stores:
        for run in runs:
            await taken(stores, run, a_worker())

        async def write(run: str) -> None:
            for k in range(1, 31):
                assert await append(stores, batch(run, Position(1, k - 1), k)) in {Append.STORED, Append.ALREADY}

        async def follow() -> dict[str, list[str]]:
            cursors = dict.fromkeys(runs, Position())
            seen: dict[str, list[str]] = {run: [] for run in runs}
            while any(len(ids) < 31 for ids in seen.values()):
                for run, entries in (await stores.log.read(cursors, wait=1.0, count=4)).items():
                    seen[run] += places(entries)
                    cursors[run] = entries[-1].position
            return seen

        async def kill() -> None:
            while True:
                for client in await stores.admin.client_list():
                    if client["db"] == str(redis_db.db) and client["cmd"] in {"evalsha", "xread"}:
                        await stores.admin.client_kill_filter(_id=client["id"])
                await asyncio.sleep(0.01)

        killing = asyncio.create_task(kill())
        async with asyncio.timeout(BOUND):
            *_, seen = await asyncio.gather(*(write(run) for run in runs), follow())
        killing.cancel()
        expected = ["begin 1-0", *(f"chunk 1-{k}" for k in range(1, 31))]
        assert seen == dict.fromkeys(runs, expected)


async def test_given_up_calls_leave_no_reply_for_the_next_caller(redis_db: Redis) -> None:
    runs = [a_run() for _ in range(50)]
    async with proxied(redis_db, reply_timeout=5.0) as (_, stores):
        for n, run in enumerate(runs):
            await claim(stores, run, a_worker(), job=b"%d" % n)
        for _ in range(10):
            given_up = [asyncio.create_task(stores.runs.job(run)) for run in runs]
            await asyncio.sleep(0)
            for task in given_up:
                task.cancel()
            assert await asyncio.gather(*(stores.runs.job(run) for run in runs)) == [b"%d" % n for n in range(50)]


async def test_while_the_server_is_away_many_callers_make_few_attempts(redis_db: Redis) -> None:
    async with proxied(redis_db, patience=1.0) as (proxy, stores):
        run = a_run()
        await taken(stores, run, a_worker())
        proxy.mood, before = Mood.BROKEN, proxy.accepted
        proxy.cut()
        errors = await asyncio.gather(*(stores.runs.result(run) for _ in range(200)), return_exceptions=True)
        assert {type(error) for error in errors} == {BrokerUnavailable}
        assert proxy.accepted - before < 15


# ----------------------------------------------------------------------------------------------- a server that forgets


async def test_flushed_scripts_are_loaded_again(private_redis: Redis) -> None:
    runs = [a_run() for _ in range(50)]
    async with stores_at(private_redis.url) as stores:
        await asyncio.gather(*(taken(stores, run, "a worker") for run in runs))
        for k in range(1, 4):
            await stores.admin.script_flush()
            told = await stores.log.append([batch(run, Position(1, k - 1), k) for run in runs])
            assert set(answers(told)) == {Append.STORED}


async def test_a_server_killed_and_started_again_keeps_what_it_acknowledged(private_redis: Redis) -> None:
    run, worker = a_run(), a_worker()
    async with stores_at(private_redis.url) as stores:
        deadline = await stores.now() + 60
        assert await claim_until(stores, run, worker, deadline) == (ClaimAnswer.NEW, 1)
        assert await append(stores, batch(run, START, 1)) is Append.STORED
        reading = asyncio.create_task(stores.log.read({run: Position(1, 1)}, wait=BOUND))
        await still_waits(reading, 0.05)
        private_redis.kill()
        appending = asyncio.create_task(append(stores, batch(run, Position(1, 1), 2)))
        await still_waits(appending, 0.2)
        await asyncio.to_thread(private_redis.start)
        async with asyncio.timeout(BOUND):
            assert await appending is Append.STORED
            assert places((await reading)[run]) == ["chunk 1-2"]
        assert await claim_until(stores, run, worker, deadline) == (ClaimAnswer.MINE, 1)


async def test_a_server_that_forgot_everything_is_told_from_one_that_has_it(private_redis: Redis) -> None:
    run, worker = a_run(), a_worker()
    async with stores_at(private_redis.url) as stores:
        await taken(stores, run, worker)
        await append(stores, batch(run, START, 1))
        await taken(stores, run, worker, "derender")
        await stores.admin.flushall()
        assert await append(stores, batch(run, Position(1, 1), 2)) is Append.LOST
        assert await stores.log.exists([run]) == [False]
        assert await stores.log.read({run: Position(1, 1)}, wait=0.05) == {}
        assert await stores.runs.save([Checkpoint(run, 1, b"state")]) == [False]
        assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.NEW
        assert await append(stores, batch(run, Position(1, 1), 2)) is Append.LOST


# ----------------------------------------------------------------------------------------------- a server that refuses


async def test_a_server_without_memory_refuses_work_and_still_takes_outcomes(private_redis: Redis) -> None:
    run, worker, client = a_run(), a_worker(), "evals"
    async with stores_at(private_redis.url) as stores, stores_at(private_redis.url, patience=0.2) as hasty:
        deadline = await stores.now() + 60
        await taken(stores, run, worker)
        await taken(stores, run, worker, "derender")
        await stores.runs.put_body(run, "job", b"{}", 60.0)
        await stores.runs.enter(client, run, 1, deadline, Allowance(requests=9))
        before = await everything(stores)
        await stores.admin.config_set("maxmemory", "1mb")
        try:
            refused: list[Coroutine[None, None, object]] = [
                append(hasty, batch(run, START, 1, 3)),
                claim(hasty, a_run(), worker, job=b"{}"),
                hasty.runs.save([Checkpoint(run, 1, b"state")]),
                hasty.runs.put_body(run, "another", b"{}", None),
                hasty.runs.enter(client, a_run(), 1, deadline, Allowance(requests=9)),
                hasty.runs.reopen(run, deadline, 60.0, fresh=True),
            ]
            for call in refused:
                with pytest.raises(BrokerUnavailable, match="is out of memory: OOM"):
                    await call
            assert await everything(stores) == before
            assert await hasty.runs.memory() > 1

            appending = asyncio.create_task(append(stores, batch(run, START, 1, 3)))
            await still_waits(appending, 0.1)
            ended, unfit = a_run(), a_run()
            assert await hasty.runs.beat(worker, [run], 30.0) == {}
            assert await hasty.runs.outcome(ended, b"done", 60.0) == b"done"
            assert await hasty.runs.refuse(unfit, "digest", b"no", 60.0) == b"no"
            assert await hasty.runs.cancel(a_run(), "not wanted", 60.0)
            assert await hasty.runs.get_body(run, "job") == b"{}"
            await hasty.runs.drop_body(run, "job")
            await hasty.runs.release(run, "derender", 1, Release.HANDOVER)
            await hasty.runs.leave(client, run)
            await hasty.runs.report("a model", worker, b"{}", 60.0)
            assert await hasty.runs.reports("a model") == {worker: b"{}"}
        finally:
            await stores.admin.config_set("maxmemory", "0")
        assert await appending is Append.STORED


async def everything(stores: RedisStores) -> dict[bytes, bytes | None]:
    """What the server holds, byte for byte, and nothing of when it goes."""
    return {key: await stores.admin.dump(key) async for key in stores.admin.scan_iter()}


async def test_the_share_of_memory_is_that_of_maxmemory_where_there_is_one(private_redis: Redis) -> None:
    async with stores_at(private_redis.url) as stores:
        used = (await stores.admin.info("memory"))["used_memory"]
        assert 0 < await stores.runs.memory() < 0.5
        await stores.admin.config_set("maxmemory", 2 * used)
        try:
            assert 0.25 < await stores.runs.memory() < 0.75
        finally:
            await stores.admin.config_set("maxmemory", "0")


async def test_a_server_demoted_to_a_replica_is_waited_for(private_redis: Redis) -> None:
    run = a_run()
    async with stores_at(private_redis.url) as stores, stores_at(private_redis.url, patience=0.2) as hasty:
        await taken(stores, run, a_worker())
        await stores.admin.replicaof("127.0.0.1", "1")
        try:
            with pytest.raises(BrokerUnavailable, match="READONLY"):
                await append(hasty, batch(run, START, 1))
            appending = asyncio.create_task(append(stores, batch(run, START, 1)))
            await still_waits(appending, 0.1)
        finally:
            await stores.admin.replicaof("NO", "ONE")
        assert await appending is Append.STORED


async def test_a_server_that_may_evict_runs_is_refused(private_redis: Redis) -> None:
    async with stores_at(private_redis.url) as stores:
        await stores.admin.config_set("maxmemory-policy", "volatile-lru")
        try:
            with pytest.raises(BrokerError, match=r"maxmemory-policy is volatile-lru, it must be noeviction"):
                async with connect_redis(private_redis.url):
                    pass
        finally:
            await stores.admin.config_set("maxmemory-policy", "noeviction")


async def test_a_password_is_needed_and_used_and_never_told(private_redis: Redis) -> None:
    async with stores_at(private_redis.url) as stores:
        await stores.admin.acl_setuser("worker", enabled=True, passwords=["+pass w%rd"], commands=["+@all"], keys=["*"])
        place = f"{private_redis.host}:{private_redis.port}"
        try:
            async with connect_redis(f"redis://worker:pass%20w%25rd@{place}") as own:
                assert await own.runs.result(a_run()) is None
            with pytest.raises(BrokerError, match="WRONGPASS") as refused:
                async with connect_redis(f"redis://worker:secret@{place}"):
                    pass
            assert "secret" not in str(refused.value)
        finally:
            await stores.admin.acl_deluser("worker")


async def test_a_server_that_is_not_there_is_unavailable_in_bounded_time(redis_db: Redis) -> None:
    async with Proxy.to(redis_db.host, redis_db.port) as proxy:
        gone = proxy.port
    with pytest.raises(BrokerUnavailable, match=str(gone)):
        async with connect_redis(f"redis://127.0.0.1:{gone}", patience=0.2):
            pass


# ----------------------------------------------------------------------------------------------- many runs, few sockets


async def test_five_hundred_runs_at_once_share_a_handful_of_connections(redis_db: Redis) -> None:
    runs = [a_run() for _ in range(500)]
    async with stores_at(redis_db.url, reply_timeout=10.0) as stores:
        deadline = await stores.now() + 60

        async def live(run: str) -> int:
            await claim_until(stores, run, "worker", deadline)
            for k in range(1, 4):
                assert await append(stores, batch(run, Position(1, k - 1), k)) is Append.STORED
            found = await stores.log.read({run: START}, wait=BOUND)
            await stores.runs.beat("worker", [run], 30.0)
            await stores.runs.outcome(run, b"done", 60.0)
            return len(found[run])

        async with asyncio.timeout(BOUND):
            assert await asyncio.gather(*map(live, runs)) == [3] * 500
        ours = [each for each in await stores.admin.client_list() if each["db"] == str(redis_db.db)]
        assert len(ours) <= 1 + READERS + 4  # one for commands, the readers, and this test's own


async def test_every_key_of_a_run_has_a_time_to_live_and_none_is_left_over(redis_db: Redis) -> None:
    async with stores_at(redis_db.url) as stores:
        for n in range(40):
            run, worker = a_run(), a_worker()
            await claim(stores, run, worker, lifetime=0.6, replay_ttl=0.1, heartbeat=0.2, job=b"{}")
            await claim(stores, run, worker, "derender", lifetime=0.6, replay_ttl=0.1, heartbeat=0.2)
            await append(stores, batch(run, START, 1, 3, ends=n % 2 == 0))
            await stores.runs.beat(worker, [run], 0.2)
            await stores.runs.save([Checkpoint(run, 1, b"state")])
            if n % 3 == 0:
                await stores.runs.outcome(run, b"done", 0.2)
            await stores.runs.cancel(a_run(), "not wanted", 0.2)
            await stores.runs.refuse(a_run(), "digest", b"no", 0.2)
            await stores.runs.put_body(run, "job", b"{}", 0.6)
            await stores.runs.enter("evals", run, n, await stores.now() + (0.1 + n / 100), Allowance())
            await stores.runs.leave("evals", a_run())
            await stores.runs.report("a model", worker, b"{}", 0.1 + n / 100)
            await stores.runs.reports("a model")
            reopened = a_run()
            await claim(stores, reopened, worker, lifetime=0.2, replay_ttl=0.1, heartbeat=0.2, job=b"{}")
            await stores.runs.outcome(reopened, b"done", 0.1)
            await stores.runs.reopen(reopened, await stores.now() + 0.4, 0.2, fresh=n % 2 == 0)
        async for key in stores.admin.scan_iter():
            assert await stores.admin.pttl(key) > 0, key
        await stores.elapse(1.0)
        assert [key async for key in stores.admin.scan_iter()] == []
