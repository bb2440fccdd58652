"""The run store's promises, kept on a real Redis."""

from contextlib import AbstractAsyncContextManager

import pytest

from headrace.broker.contract.runs import RunStoreContract
from headrace.broker.contract.stores import Stores
from tests.contract.worlds import RedisWorld
from tests.servers import Redis


@pytest.mark.servers
class TestRedisRuns(RunStoreContract):
    @pytest.fixture(autouse=True)
    def _world(self, redis_db: Redis) -> None:
        self.world = RedisWorld(redis_db.url)

    def connect(self) -> AbstractAsyncContextManager[Stores]:
        return self.world.connect()
