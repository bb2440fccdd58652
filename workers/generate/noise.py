"""Counter-based noise: the draw for a token depends on nothing but seed, choice and position.

So a run makes the same draws alone or in a batch, and after it was resumed elsewhere. The generator is SplitMix64,
started at a place that seed and choice give.
"""

from __future__ import annotations

import hashlib
from typing import Final

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def seed_of(run: str) -> int:
    """The seed of a run whose request names none."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def stream(seed: int, choice: int) -> int:
    """Where the draws of one choice start."""
    return bits(bits(seed & _MASK, 0), choice)


def bits(start: int, position: int) -> int:
    """64 random bits for one position of a stream."""
    z = (start + (position + 1) * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(start: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (bits(start, position) >> 11) * 2.0**-53
