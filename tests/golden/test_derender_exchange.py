"""Real HTTP exchanges of the reference, put to our derenderer: its bodies, its states, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.protocol import (
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    HeadraceError,
    bad_request,
)
from headrace.workers.derender import Derenderer
from tests.shared import golden_folder, tokenizer_folder

EOS = "<|im_end|>"
CHAT = "/v1/chat/completions/derender"
COMPLETION = "/v1/completions/derender"
STREAMS = {
    "06_chat_derender_stream": CHAT,
    "11_completions_derender_stream": COMPLETION,
    "26_derender_eos_stream": CHAT,
}


@pytest.fixture(scope="module")
def parsing() -> Derenderer:
    return Derenderer.load(tokenizer_folder("qwen3"), "hermes", "qwen3", max_model_len=2048)


def exchanges(name: str) -> list[dict[str, Any]]:
    recorded = json.loads((golden_folder() / "exchange" / f"{name}.json").read_bytes())
    return recorded if isinstance(recorded, list) else [recorded]


def answer(derenderer: Derenderer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What we answer to this body at this path, as JSON."""
    if path == CHAT:
        if body.get("stream"):
            return derenderer.chat_stream(DerenderChatStreamRequest.model_validate(body)).model_dump(mode="json")
        return derenderer.chat(DerenderChatRequest.model_validate(body)).model_dump(mode="json")
    if body.get("stream"):
        streaming = DerenderCompletionStreamRequest.model_validate(body)
        return derenderer.completion_stream(streaming).model_dump(mode="json")
    return derenderer.completion(DerenderCompletionRequest.model_validate(body)).model_dump(mode="json")


@pytest.mark.parametrize("name", ["05_chat_derender_nonstream", "09_completions_derender_nonstream", "24_derender_eos"])
def test_a_final_equals_the_recorded_one_but_for_the_clock_and_the_end_token(parsing: Derenderer, name: str) -> None:
    (recorded,) = exchanges(name)
    want = recorded["body"]
    done = answer(parsing, recorded["path"], {"model": want["model"], **recorded["request"]})
    for choice in want["choices"]:
        message = choice.get("message", {})
        message.update({key: message[key].removesuffix(EOS) for key in ("content", "reasoning") if message.get(key)})
    assert {**done, "created": 0} == {**want, "created": 0}


@pytest.mark.parametrize("name", STREAMS)
def test_every_chunk_continues_from_the_state_that_the_reference_carried(parsing: Derenderer, name: str) -> None:
    recorded = exchanges(name)
    assert any(exchange["request"]["stream_state"] for exchange in recorded)
    for exchange in recorded:
        want = exchange["response"]["chunk"]
        done = answer(parsing, STREAMS[name], {"model": want["model"], **exchange["request"]})["chunk"]
        for choice in want["choices"]:
            delta = choice.get("delta", {})
            if delta.get("content") == EOS:
                delta["content"] = None
        assert {**done, "created": 0} == {**want, "created": 0}


@pytest.mark.parametrize("name", ["06_chat_derender_stream", "26_derender_eos_stream"])
def test_a_state_to_be_replayed_and_our_own_lead_to_the_same_chunks(parsing: Derenderer, name: str) -> None:
    recorded = exchanges(name)
    state = None
    for exchange in recorded:
        replayed = answer(parsing, CHAT, exchange["request"])
        own = answer(parsing, CHAT, {**exchange["request"], "stream_state": state})
        assert own == replayed
        state = own["stream_state"]
        assert state["output_token_ids"] == []


@pytest.mark.parametrize(
    "name",
    [
        "13_err_no_chat_request",
        "14_err_stream_no_prompt_ids",
        "15_err_two_choices",
        "19_err_too_long",
        "20_err_two_choices_completion",
    ],
)
def test_a_refusal_has_the_recorded_body(parsing: Derenderer, name: str) -> None:
    (recorded,) = exchanges(name)
    with pytest.raises(HeadraceError) as caught:
        answer(parsing, recorded["path"], recorded["request"])
    assert caught.value.error.model_dump(mode="json") == recorded["body"]
    assert caught.value.status == recorded["status"]


@pytest.mark.parametrize(
    ("name", "param"), [("16_err_bad_state", "stream_state"), ("18_err_text_mode", "generate_response.output_mode")]
)
def test_a_body_of_the_wrong_shape_is_refused_at_the_door_by_field(parsing: Derenderer, name: str, param: str) -> None:
    (recorded,) = exchanges(name)
    with pytest.raises(ValidationError) as caught:
        answer(parsing, recorded["path"], recorded["request"])
    refused = bad_request(caught.value)
    assert (refused.status, (refused.param or "").startswith(param)) == (recorded["status"], True)


def recorded_refusals() -> list[dict[str, Any]]:
    """Bodies that the reference's endpoints refuse by themselves, for a model of 8 tokens, and their answers."""
    lines = (Path(__file__).parent / "refusals.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("refused", recorded_refusals(), ids=lambda refused: f"{refused['door']}: {refused['why']}")
def test_what_the_reference_refuses_we_refuse_in_its_words(refused: dict[str, Any]) -> None:
    formats = ("hermes", "qwen3") if refused["parsed"] else (None, None)
    derenderer = Derenderer.load(tokenizer_folder("qwen3"), *formats, max_model_len=8)
    with pytest.raises(HeadraceError) as caught:
        answer(derenderer, CHAT if refused["door"].startswith("chat") else COMPLETION, refused["body"])
    assert caught.value.error.model_dump(mode="json") == refused["answer"]
