"""The parts of the Redis store that need no server: names, addresses, what a server says of itself, pauses."""

import ssl

import pytest
import redis.crc
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.ports import BrokerError
from headrace.broker.redis.keys import Keys, run_of_log
from headrace.broker.redis.line import Address, check_server
from headrace.broker.redis.log import gather_s
from headrace.broker.redis.runs import LATEST_MS, _ms
from headrace.protocol.jobs import partition_of, run_of

FIT = {
    "redis_version": "7.0.15",
    "redis_mode": "standalone",
    "maxmemory_policy": "noeviction",
}


@given(client=st.text(max_size=8), request_id=st.text(max_size=8))
def test_all_keys_of_a_run_share_a_slot_and_name_their_run(client: str, request_id: str) -> None:
    run = run_of(client, request_id)
    keys = Keys().of(run)
    assert len({redis.crc.key_slot(key) for key in keys}) == 1
    assert len(set(keys)) == len(keys)
    assert keys.log == f"hr:{{p{partition_of(run)}}}:{run}:log".encode()
    assert run_of_log(keys.log) == run


@given(client=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), model=st.text(max_size=200))
def test_what_is_counted_of_a_client_or_a_model_lies_in_one_slot_each(client: str, model: str) -> None:
    for keys in (Keys().under_way(client), Keys().reports(model)):
        assert len({redis.crc.key_slot(key) for key in keys}) == 1
        assert len(set(keys)) == len(keys)


def test_a_client_that_may_use_its_own_keys_cannot_reach_what_is_counted_of_it() -> None:
    own = Keys().events("acme", "")[: -len(b"events:")]
    assert own == b"hr:{c:acme}:"
    assert not any(key.startswith(own) for key in Keys().under_way("acme"))


def test_a_body_lies_beside_its_run() -> None:
    run = run_of("c", "r")
    body = Keys().body(run, "job")
    assert redis.crc.key_slot(body) == redis.crc.key_slot(Keys().of(run).run)
    assert body not in Keys().of(run)


def test_two_prefixes_share_no_key() -> None:
    run = run_of("c", "r")
    assert not set(Keys("a").of(run)) & set(Keys("b").of(run))


@pytest.mark.parametrize("prefix", ["", "a{b}", "with space", "x" * 65])
def test_a_prefix_that_would_spoil_the_slots_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        Keys(prefix)


def test_an_address_is_read_from_a_url_and_never_shows_its_password() -> None:
    address = Address.parse("redis://me:s%20ecret@cache.example:6380/3")
    assert (address.host, address.port, address.db) == ("cache.example", 6380, 3)
    assert (address.username, address.password, address.tls) == ("me", "s ecret", None)
    assert str(address) == "cache.example:6380/3"
    assert "ecret" not in repr(address)


def test_tls_is_checked_unless_told_otherwise() -> None:
    checked = Address.parse("rediss://cache.example").tls
    assert checked is not None and checked.verify_mode is ssl.CERT_REQUIRED and checked.check_hostname
    unchecked = Address.parse("rediss://cache.example?ssl_cert_reqs=none").tls
    assert unchecked is not None and unchecked.verify_mode is ssl.CERT_NONE


def test_a_socket_path_is_an_address() -> None:
    address = Address.parse("unix:///run/redis.sock?db=2")
    assert (address.path, address.db, str(address)) == ("/run/redis.sock", 2, "/run/redis.sock/2")


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        Address.parse("amqp://localhost")


def info(**other: str) -> str:
    return "# Server\r\n" + "\r\n".join(f"{key}:{value}" for key, value in (FIT | other).items())


def test_a_fit_server_passes() -> None:
    check_server("here", info())
    check_server("here", info(redis_version="8.2.1"))


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"redis_version": "6.2.14"}, "version 6.2.14: 7.0 or newer"),
        ({"redis_version": "strange"}, "version strange"),
        ({"redis_mode": "cluster"}, "runs as cluster"),
        ({"redis_mode": "sentinel"}, "runs as sentinel"),
        ({"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru, it must be noeviction"),
        ({"maxmemory_policy": "volatile-ttl"}, "maxmemory-policy is volatile-ttl"),
    ],
)
def test_an_unfit_server_is_refused_by_name(said: dict[str, str], wrong: str) -> None:
    with pytest.raises(BrokerError, match="here") as refused:
        check_server("here", info(**said))
    assert wrong in str(refused.value)


@given(watched=st.integers(1, 5000), found=st.integers(0, 5000))
def test_a_reader_pauses_only_after_finding_few_of_many(watched: int, found: int) -> None:
    pause = gather_s(watched, found)
    assert 0 <= pause <= 0.02
    if found == 0 or found * 2 >= watched or watched < 100:
        assert pause == 0
    else:
        assert pause >= 0.001


@given(st.floats(min_value=0, allow_nan=False))
def test_any_time_is_one_that_the_server_takes(seconds: float) -> None:
    assert 1 <= _ms(seconds) <= LATEST_MS
