"""The sampler keeps to every parameter, row by row, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.protocol.wire import TokenLogprobEntry
from headrace.workers.generate import noise
from headrace.workers.generate.engines.draw import FEW, draw
from headrace.workers.generate.engines.sampler import LOWEST_LOGPROB, Sampler
from headrace.workers.generate.row import Ending, Row, Sampling

torch.set_num_threads(1)

VOCABULARY = 500
SAMPLED = Sampling(temperature=1.0)


def row(
    sampling: Sampling = SAMPLED, *, prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), **ending: Any
) -> Row:
    return Row("run", 0, [*prompt, *output], len(prompt), Ending(99, **ending), sampling)


def scores(seed: int = 0, rows: int = 1, spread: float = 2.0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(logits: Tensor, rows: Sequence[Row]) -> list[int | None]:
    return [sampled.token for sampled in Sampler().sample(logits, rows)]


# ------------------------------------------------------------------------------------------------ distributions


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probability of each token, by the definitions, one after the other: [V] in float64."""
    weights = (logits.double() / sampling.temperature).softmax(-1)
    weights[weights < sampling.min_p * weights.max()] = 0
    order = weights.argsort(descending=True, stable=True)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    above = weights[order].cumsum(-1) - weights[order]
    weights[order[above >= sampling.top_p]] = 0
    return weights / weights.sum()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The chance of counts at least this far from what is expected; cells of less than five are taken together."""
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(max(len(wanted) - 1, 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


KNOBS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.5, 1.6),
    "top_k": (1, 7, FEW + 20),
    "top_p": (0.05, 0.6, 0.97),
    "min_p": (0.02, 0.4),
}
SETTINGS = [
    Sampling(temperature=1.0),
    *(replace(SAMPLED, **{knob: value}) for knob, values in KNOBS.items() for value in values),
    *(
        replace(SAMPLED, **{one: first, other: second})
        for one, firsts in KNOBS.items()
        for other, seconds in KNOBS.items()
        if one < other
        for first, second in zip(firsts, seconds, strict=False)
    ),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.03),
]


def _name(sampling: Sampling) -> str:
    return ",".join(f"{knob}={value}" for knob, value in asdict(sampling).items() if knob in KNOBS)


@pytest.mark.parametrize("sampling", SETTINGS, ids=_name)
def test_draws_are_distributed_as_the_definitions_say(sampling: Sampling) -> None:
    logits, draws = scores(3), 20_000
    drawn = torch.cat(
        [
            draw(logits.expand(2000, -1), [row(replace(sampling, noise=noise.stream(seed, 0))) for seed in seeds])
            for seeds in (range(start, start + 2000) for start in range(0, draws, 2000))
        ]
    )
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    wanted = reference(logits[0], sampling)
    assert not counts[wanted == 0].any()
    assert chi_square(counts, wanted * draws) > 1e-4


def test_draws_of_successive_positions_are_as_good_as_those_of_different_seeds() -> None:
    logits = scores(3)
    rows = [row(replace(SAMPLED, noise=noise.stream(5, 0)), output=[0] * made) for made in range(4000)]
    counts = torch.bincount(draw(logits.expand(4000, -1), rows), minlength=VOCABULARY).double()
    assert chi_square(counts, reference(logits[0], SAMPLED) * 4000) > 1e-4


def test_no_token_without_weight_is_ever_drawn_however_the_number_falls() -> None:
    logits = torch.full((1, 130), -math.inf)
    logits[0, 64] = 0.0
    rows = [row(replace(SAMPLED, noise=noise.stream(seed, 0))) for seed in range(500)]
    assert set(draw(logits.expand(500, -1), rows).tolist()) == {64}


# ------------------------------------------------------------------------------------------------ rows in a batch


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, FEW + 9]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition=st.sampled_from([1.0, 1.4]),
    frequency=st.sampled_from([0.0, 0.7]),
    presence=st.sampled_from([0.0, -0.4]),
    bias=st.dictionaries(st.integers(0, 99), st.floats(-5, 5), max_size=3),
    allowed=st.one_of(st.none(), st.lists(st.integers(0, VOCABULARY - 1), min_size=1, unique=True).map(tuple)),
    logprobs=st.sampled_from([None, 0, 3]),
    noise=st.integers(0, 2**64 - 1),
)
some_rows = st.builds(
    row,
    samplings,
    output=st.lists(st.integers(0, 99), max_size=8),
    minimum=st.sampled_from([0, 4]),
    eos=st.just(frozenset([2])),
)


@given(st.lists(some_rows, min_size=1, max_size=8), st.integers(0, 1000))
def test_a_row_gets_the_same_in_any_batch(rows: list[Row], seed: int) -> None:
    logits = scores(seed, len(rows))
    together = Sampler().sample(logits.clone(), rows)
    assert together == [Sampler().sample(logits[i : i + 1].clone(), [one])[0] for i, one in enumerate(rows)]


def test_the_draw_of_a_position_depends_on_seed_and_choice() -> None:
    logits = scores(1).expand(60, -1)

    def drawn(stream: Iterable[int]) -> list[int | None]:
        return tokens(logits, [row(replace(SAMPLED, noise=start)) for start in stream])

    seeds = drawn(noise.stream(seed, 0) for seed in range(60))
    choices = drawn(noise.stream(0, choice) for choice in range(60))
    assert len(set(seeds)) > 20
    assert len(set(choices)) > 20
    assert seeds != choices
    assert seeds == drawn(noise.stream(seed, 0) for seed in range(60))


def test_negative_seeds_are_seeds_of_their_own() -> None:
    assert len({noise.stream(seed, 0) for seed in (-(2**63), -2, -1, 0, 1, 2**63 - 1)}) == 6


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_whose_logits_are_not_finite_gets_nothing_and_the_others_are_unharmed(poison: float) -> None:
    rows = [row(replace(SAMPLED, noise=i, top_k=k, top_p=p)) for i, (k, p) in enumerate([(0, 1.0), (9, 0.5), (0, 0.5)])]
    logits = scores(2, 6)
    clean = tokens(logits, [*rows, *rows])
    logits[0, 7] = logits[1, 7] = logits[2, 7] = poison
    assert tokens(logits, [*rows, *rows]) == [None, None, None, *clean[3:]]


def test_a_row_that_may_take_no_token_gets_nothing() -> None:
    barred = row(replace(SAMPLED, allowed=(2,)), minimum=3, eos=frozenset([2]))
    assert tokens(scores(2, 2), [barred, row()])[0] is None


# ------------------------------------------------------------------------------------------------ single tokens


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 0.0, 1.0, 2.0]])
    assert tokens(logits, [row(Sampling()), row(Sampling())]) == [1, 0]


def test_allowed_ids_are_the_only_ones() -> None:
    logits = torch.tensor([[9.0, 3.0, 5.0, 1.0]])
    assert tokens(logits, [row(Sampling(allowed=(1, 3)))]) == [1]


def test_bias_is_added_to_the_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert tokens(logits, [row(Sampling(bias={2: 1.5, 1: 0.0}))]) == [2]


def test_what_would_end_the_row_is_barred_until_it_has_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]]).expand(2, -1)
    ends: dict[str, Any] = {"minimum": 3, "eos": frozenset([0]), "stops": frozenset([1])}
    early, late = row(Sampling(), output=[3, 3], **ends), row(Sampling(), output=[3, 3, 3], **ends)
    assert tokens(logits, [early, late]) == [2, 0]


def adjusted(logits: Tensor, one: Row) -> Tensor:
    """What the penalties make of the logits, by the definitions."""
    logits, output = logits.clone(), one.tokens[one.prompt :]
    for token in set(one.tokens):
        value, factor = logits[token], one.sampling.repetition
        logits[token] = value / factor if value > 0 else value * factor
    for token in set(output):
        logits[token] -= one.sampling.frequency * output.count(token) + one.sampling.presence
    return logits


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=12),
    st.lists(st.integers(0, 19), max_size=30),
    st.sampled_from([0.6, 1.0, 1.8]),
    st.sampled_from([-0.5, 0.0, 0.9]),
    st.sampled_from([-1.0, 0.0, 1.0]),
    st.integers(0, 100),
)
def test_penalties_count_the_tokens_so_far(
    prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float, seed: int
) -> None:
    penalties = Sampling(repetition=repetition, frequency=frequency, presence=presence)
    logits = scores(seed, vocabulary=20)
    one = row(penalties, prompt=prompt, output=output)
    wanted = adjusted(logits[0], one)
    (token,) = tokens(logits, [one])
    assert token is not None
    assert wanted[token] == pytest.approx(float(wanted.max()), abs=1e-5)


def test_counts_that_are_carried_along_equal_counts_made_anew() -> None:
    penalised = Sampling(repetition=1.3, frequency=0.4, presence=0.2, temperature=1.0, noise=4)
    one, sampler = row(penalised), Sampler()
    for step in range(30):
        logits = scores(step, vocabulary=20)
        carried = sampler.sample(logits, [one])[0].token
        assert [carried] == tokens(logits, [one])
        assert carried is not None
        one.tokens.append(carried)


# ------------------------------------------------------------------------------------------------ logprobs


def entry(logits: Tensor, one: Row) -> TokenLogprobEntry:
    logprob = Sampler().sample(logits, [one])[0].logprob
    assert logprob is not None
    return logprob


def test_logprobs_are_those_of_the_model_before_any_parameter() -> None:
    logits = scores(5)
    found = entry(logits, row(Sampling(temperature=1.5, bias={3: 50.0}, repetition=1.5, logprobs=4)))
    expected = logits[0].log_softmax(-1)
    assert found.token_id == 3
    assert found.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    assert found.rank == int((expected > expected[3]).sum()) + 1
    best = expected.topk(3)
    assert [top.token_id for top in found.top_logprobs[1:]] == best.indices.tolist()
    assert [top.logprob for top in found.top_logprobs[1:]] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [top.rank for top in found.top_logprobs[1:]] == [1, 2, 3]


@pytest.mark.parametrize(("asked", "told"), [(0, [3]), (1, [3]), (2, [3, 1]), (3, [3, 1, 2])])
def test_the_sampled_token_comes_first_and_counts(asked: int, told: list[int]) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    found = entry(logits, row(Sampling(bias={3: 9.0}, logprobs=asked)))
    assert [top.token_id for top in found.top_logprobs] == told


def test_a_sampled_token_that_is_among_the_likeliest_is_told_once() -> None:
    found = entry(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), row(Sampling(logprobs=3)))
    assert [(top.token_id, top.rank) for top in found.top_logprobs] == [(1, 1), (2, 2), (3, 3)]


def test_minus_infinity_is_told_as_a_number() -> None:
    found = entry(torch.tensor([[0.0, -math.inf]]), row(Sampling(logprobs=2)))
    assert found.top_logprobs[1].logprob == LOWEST_LOGPROB


def test_only_rows_that_ask_for_logprobs_get_them() -> None:
    sampled = Sampler().sample(scores(1, 3), [row(), row(replace(SAMPLED, logprobs=1)), row()])
    assert [one.logprob is None for one in sampled] == [True, False, True]
