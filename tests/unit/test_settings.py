"""Settings: read from the environment, refused by name, printed without secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.settings import PREFIX, Settings, SettingsError, masked


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)


def test_without_urls_everything_runs_in_one_process() -> None:
    assert Settings.load().embedded


def test_each_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CLIENT", "evals")
    monkeypatch.setenv("HEADRACE_BATCH_IN_FLIGHT", "7")
    settings = Settings.load()
    assert (settings.client, settings.batch_in_flight) == ("evals", 7)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEADRACE_CLIENT", "two.words"),
        ("HEADRACE_REPLAY_TTL", "0"),
        ("HEADRACE_BATCH_IN_FLIGHT", "none"),
        ("HEADRACE_LOG_LEVEL", "loud"),
        ("HEADRACE_STREAM_BUFFER", "0"),
        ("HEADRACE_AMQP_URL", "localhost"),
        ("HEADRACE_AMQP_URL", "http://a"),
        ("HEADRACE_AMQP_URL", "amqp://"),
        ("HEADRACE_AMQP_URL", "amqp://h:99999/"),
        ("HEADRACE_AMQP_URL", "amqp://[::1"),
        ("HEADRACE_AMQP_URL", "amqp://me:a#b@h/"),
        ("HEADRACE_AMQP_URL", "amqp://a,http://b"),
        ("HEADRACE_REDIS_URL", "localhost:6379"),
        ("HEADRACE_REDIS_URL", "redis://h:none/0"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^{variable}: "):
        Settings.load()


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_url_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch, empty: str) -> None:
    monkeypatch.setenv("HEADRACE_AMQP_URL", empty)
    monkeypatch.setenv("HEADRACE_REDIS_URL", empty)
    assert Settings.load().embedded


@pytest.mark.parametrize(("given_url", "missing"), [("amqp_url", "REDIS"), ("redis_url", "AMQP")])
def test_one_url_alone_is_refused(given_url: str, missing: str) -> None:
    settings = Settings.model_validate({given_url: f"{given_url.removesuffix('_url')}://h"})
    with pytest.raises(SettingsError, match=f"^HEADRACE_{missing}_URL is not set"):
        settings.require_both_urls_or_none()
    assert not settings.embedded


def test_a_password_is_in_no_form_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_AMQP_URL", "amqp://me:s3cret@a:5672/v,amqp://me:s3cret@b:5672/v")
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://:s3cret@c:6379/0")
    settings = Settings.load()
    printed = repr(settings) + str(settings) + repr(settings.shown())
    assert "s3cret" not in printed
    shown = {entry.variable: entry.value for entry in settings.shown()}
    assert shown["HEADRACE_AMQP_URL"] == "amqp://me:***@a:5672/v,amqp://me:***@b:5672/v"
    assert shown["HEADRACE_REDIS_URL"] == "redis://:***@c:6379/0"


@pytest.mark.parametrize(
    ("variable", "value"), [("HEADRACE_CLIENT", "s3cret!"), ("HEADRACE_AMQP_URL", "amqp://me:s3cret#@h/")]
)
def test_a_refusal_does_not_repeat_the_value(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as refused:
        Settings.load()
    assert "s3cret" not in str(refused.value)


_part = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)
_secret = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1)


@given(user=_part, password=_secret, host=_part)
def test_masking_hides_any_password_and_nothing_else(user: str, password: str, host: str) -> None:
    assert masked(f"amqp://{user}:{password}@{host}:5672/v") == f"amqp://{user}:***@{host}:5672/v"
    assert masked(f"amqp://{host}:5672/v") == f"amqp://{host}:5672/v"


def test_every_setting_is_listed_with_default_and_description() -> None:
    shown = Settings.load().shown()
    assert {entry.variable for entry in shown} == {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert all(entry.description and entry.default for entry in shown)


def test_every_number_says_its_unit() -> None:
    units = ("seconds", "bytes", "requests", "tokens", "chunks", "tries", "failures", "processes", "share of", "port")
    for name, field in Settings.model_fields.items():
        if field.annotation in (int, float):
            assert any(unit in (field.description or "") for unit in units), name
