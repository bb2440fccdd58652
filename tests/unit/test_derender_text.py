"""Generate requests that are answered with text: the engine's tokens, read plainly, cut where the request says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw
from tokenizers import Tokenizer

from headrace.protocol import GenerateRequest, GenerateTextResponse, GenerateTextStreamResponse, wire
from headrace.protocol.jobs import GenerateJob
from headrace.workers.derender import Derenderer
from headrace.workers.derender.telling import telling_of
from headrace.workers.derender.text_session import TextSession
from headrace.workers.outcome import End
from tests.unit.derender_tokenizer import END, byte_level, ids_of


class Model:
    """A derenderer with formats, which text mode has no use for, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = byte_level(folder)
        self.derenderer = Derenderer.load(folder, "hermes", "qwen3", max_model_len=4096)
        (self.end,) = ids_of(self.tokenizer, [END])

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def session(self, checkpoint: bytes | None = None, prompt: str = "a question", **params: Any) -> TextSession:
        request = self.request(prompt, **params)
        return TextSession(self.derenderer, request, id="id", created=7, model="m", checkpoint=checkpoint)

    def request(self, prompt: str = "a question", **params: Any) -> GenerateRequest:
        body = {"request_id": "g", "token_ids": self.ids(prompt), "output_mode": "text", "sampling_params": params}
        return GenerateRequest.model_validate(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("text"))


def choice(ids: list[int], finish_reason: str | None = None, **more: Any) -> wire.TokenChoice:
    return wire.TokenChoice(index=0, token_ids=ids, finish_reason=finish_reason, **more)


def chunk(*choices: wire.TokenChoice, **more: Any) -> wire.TokenChunk:
    return wire.TokenChunk(request_id="g", choices=list(choices), **more)


def stepped(session: TextSession, parts: list[wire.TokenChoice]) -> list[wire.TextChoice]:
    """The choices that the parts give; each chunk is one that the protocol knows."""
    told = []
    for part in parts:
        done = session.step(chunk(part))
        GenerateTextStreamResponse.model_validate_json(msgspec.json.encode(done))
        told += done.choices
    return told


def test_text_is_everything_that_the_tokens_say_markup_and_all(model: Model) -> None:
    text = '<think>why</think><tool_call>{"name": "f"}</tool_call> 鬱'
    parts = [choice([token_id]) for token_id in model.ids(text)]
    told = stepped(model.session(), [*parts, choice([], "stop")])
    assert "".join(one.text for one in told) == text
    assert [one.token_ids for one in told[:-1]] == [[token_id] for token_id in model.ids(text)]
    assert (told[-1].text, told[-1].finish_reason) == ("", "stop")


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_text_ends_at_a_stop_string_and_so_do_its_tokens(model: Model, include: bool, text: str) -> None:
    params = {"stop": ["END"], "include_stop_str_in_output": include}
    ids = model.ids("one ENDtwo")
    session = model.session(**params)
    told = stepped(session, [*(choice([i], sampling_mask=[[i]]) for i in ids), choice([], "length")])
    assert session.stopped == {0}
    whole = model.session(**params).final([choice(ids, "length", sampling_mask=[[i] for i in ids])]).choices[0]
    assert "".join(one.text for one in told) == whole.text == text
    kept = [i for one in told for i in one.token_ids or ()]
    assert kept == whole.token_ids == model.ids("one END")
    assert [mask for one in told for mask in one.sampling_mask or ()] == whole.sampling_mask == [[i] for i in kept]
    assert (told[-1].finish_reason, told[-1].stop_reason) == (whole.finish_reason, whole.stop_reason) == ("stop", "END")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "one"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, f"one{END}"),
        ({"skip_special_tokens": False}, "one"),
        ({"skip_special_tokens": False, "ignore_eos": True}, f"one{END}"),
    ],
)
def test_the_end_token_has_no_text_unless_it_is_to_be_included(model: Model, params: dict[str, Any], text: str) -> None:
    ids = [*model.ids("one"), model.end]
    (done,) = stepped(model.session(**params), [choice(ids, "stop")])
    assert (done.text, done.token_ids) == (text, ids)


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "onetwo")])
def test_a_stop_tokens_text_is_left_out(model: Model, include: bool, text: str) -> None:
    stop = model.ids("two")
    params = {"stop_token_ids": stop, "include_stop_str_in_output": include}
    (done,) = stepped(model.session(**params), [choice([*model.ids("one"), *stop], "stop", stop_reason=stop[-1])])
    assert (done.text, done.stop_reason) == (text, stop[-1])


def test_log_probabilities_are_told_in_text_and_candidates_too(model: Model) -> None:
    ids = model.ids("a鬱")
    entries = [wire.TokenLogprobEntry(token_id=i, logprob=-1.0, top_logprobs=[wire.TokenLogprob(i, -1.0)]) for i in ids]
    parts = [choice([i], logprobs=wire.TokenLogprobs([entry])) for i, entry in zip(ids, entries, strict=True)]
    told = [
        entry
        for one in stepped(model.session(logprobs=1), parts)
        if one.logprobs
        for entry in one.logprobs.content or ()
    ]
    assert [entry.token for entry in told] == ["a", "", "", "鬱"]
    whole = model.session(logprobs=1).final([choice(ids, "stop", logprobs=wire.TokenLogprobs(entries))])
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.model_dump()["content"] == [msgspec.to_builtins(entry) for entry in told]


def test_what_an_engine_says_besides_goes_along(model: Model) -> None:
    usage, metrics = wire.Usage(3, 5, 2), wire.Metrics(queue_time_ms=1.5)
    versions = [wire.WeightVersion("v1", 0, 2)]
    one = choice([5, 6], "abort", routed_experts="ab", weight_versions=versions)
    done = model.session().step(chunk(one, usage=usage, metrics=metrics, prompt_token_ids=[1]))
    assert (done.usage, done.metrics, done.prompt_token_ids) == (usage, metrics, [1])
    assert (done.choices[0].routed_experts, done.choices[0].weight_versions) == ("ab", versions)
    whole = model.session().final([one], metrics=metrics)
    assert (done.request_id, whole.request_id, whole.created, whole.model) == ("id", "id", 7, "m")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(model.ids("a question")), 2)
    assert whole.choices[0].finish_reason == "abort"
    assert model.session().step(chunk(usage=usage)).choices == []


TEXTS = st.lists(st.sampled_from(["one ", "END", "EN", "鬱", "é", "<think>", END, "\n"]), max_size=8).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=6), stop=st.sampled_from([[], ["END"], ["e E", "é"]]))
def test_any_chunks_with_a_restart_after_each_give_the_whole_text(
    model: Model, text: str, cuts: list[int], stop: list[str]
) -> None:
    ids = model.ids(text)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    checkpoint, told = None, []
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        session = model.session(checkpoint, stop=stop)
        told += stepped(session, [choice(ids[start:end])])
        checkpoint = session.checkpoint()
    told += stepped(model.session(checkpoint, stop=stop), [choice([], "stop")])
    whole = model.session(stop=stop).final([choice(ids, "stop")]).choices[0]
    assert "".join(one.text for one in told) == whole.text
    assert [i for one in told for i in one.token_ids or ()] == whole.token_ids
    assert told[-1].stop_reason == whole.stop_reason


def test_a_worker_tells_a_generate_request_in_the_mode_that_it_asks_for(model: Model) -> None:
    ids = model.ids("one 鬱")

    def told(mode: str, delivery: str) -> tuple[dict[str, Any], dict[str, Any]]:
        request = {"token_ids": [1, 2], "sampling_params": {}, "output_mode": mode}
        job = GenerateJob(
            client="c",
            request_id="g",
            model="m",
            delivery=delivery,
            submitted_at=1.0,
            deadline=9.0,
            request=Raw(json.dumps(request).encode()),
            source=UNSET,
        )
        telling = telling_of(model.derenderer, job)
        one = chunk(choice(ids, "stop", routed_experts="ab"))
        told = telling.chunk(one, msgspec.json.encode(one))
        end = End(extra={"kv_transfer_params": Raw(b'{"a":1}'), "prompt_logprobs": Raw(b"[null]")})
        return {} if told is None else json.loads(told), json.loads(telling.final(end))

    chunk_told, whole = told("text", "stream")
    assert chunk_told["choices"][0]["routed_experts"] == whole["choices"][0]["routed_experts"] == "ab"
    assert chunk_told["choices"][0]["text"] == whole["choices"][0]["text"] == "one 鬱"
    assert chunk_told["request_id"] == whole["request_id"] == "g"
    assert (whole["kv_transfer_params"], whole["prompt_logprobs"]) == ({"a": 1}, [None])
    assert GenerateTextResponse.model_validate(whole).output_mode == "text"
    for mode, delivery in (("tokens", "stream"), ("text", "tokens")):
        chunk_told, whole = told(mode, delivery)
        assert chunk_told["output_mode"] == whole["output_mode"] == "tokens"
        assert whole["choices"][0]["routed_experts"] == "ab"
    assert told("text", "final")[0] == {}
