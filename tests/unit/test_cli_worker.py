"""What a worker process does besides its roles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headrace.cli.worker import COLLECT_AFTER, spare_the_collector


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
def test_what_a_worker_has_loaded_is_not_looked_through_again() -> None:
    loaded = [[number] for number in range(100)]
    spare_the_collector()
    assert gc.get_freeze_count() > len(loaded)
    assert not any(kept is loaded for kept in gc.get_objects())


@pytest.mark.usefixtures("collector")
def test_garbage_that_comes_later_is_still_collected() -> None:
    spare_the_collector()
    assert gc.isenabled()
    assert gc.get_threshold() == COLLECT_AFTER
    ring: list[object] = []
    ring.append(ring)
    del ring
    assert gc.collect() >= 1
