"""The token log's promises, kept in one process."""

from contextlib import AbstractAsyncContextManager

import pytest

from headrace.broker.contract.log import TokenLogContract
from headrace.broker.contract.stores import Stores
from tests.contract.worlds import EmbeddedWorld


class TestEmbeddedLog(TokenLogContract):
    @pytest.fixture(autouse=True)
    def _world(self) -> None:
        self.world = EmbeddedWorld.new()

    def connect(self) -> AbstractAsyncContextManager[Stores]:
        return self.world.connect()
