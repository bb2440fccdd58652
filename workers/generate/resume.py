"""What earlier epochs of a run have left in its log."""

from __future__ import annotations

from headrace.broker.ports import TokenLog
from headrace.workers.follow import Follower, read_all
from headrace.workers.generate.engine import ChoiceSoFar


async def durable(log: TokenLog, run: str, follower: Follower) -> tuple[ChoiceSoFar, ...]:
    """The durable tokens of a run, by choice; the follower then stands behind them. Raises StreamLost."""
    tokens: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    for _, chunk in await read_all(log, run, follower):
        for choice in chunk.choices if chunk is not None else ():
            tokens.setdefault(choice.index, []).extend(choice.token_ids or ())
            if choice.finish_reason is not None:
                finished[choice.index] = choice.finish_reason
    return tuple(ChoiceSoFar(index, tuple(ids), finished.get(index)) for index, ids in sorted(tokens.items()))
