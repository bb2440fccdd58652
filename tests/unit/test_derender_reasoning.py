"""Reasoning formats: what each of them writes, where an output begins, and what a request turns off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from headrace.protocol import ChatCompletionRequest
from headrace.protocol.wire import TokenChoice
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.formats import REASONING, TOOLS, MessageScanner
from headrace.workers.derender.formats.content import MAX_BLANK
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from tests.unit.derender_tokenizer import byte_level
from tests.unit.scanned import pieces_of, read

ROWS = [row for row in dict.fromkeys(REASONING.values()) if not row.harmony]
NAMES = [row.name for row in ROWS]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def thought(name: str, text: str, phase: str | None = None) -> tuple[str, str]:
    """Reasoning and content of an output that begins as the format does."""
    row = REASONING[name]
    said, _ = read(MessageScanner(row), [text], phase or row.begins)  # type: ignore[arg-type]
    return said.reasoning, said.content


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("think", "<think>why</think>so", "why", "so"),
        ("think", "so it is", "", "so it is"),
        ("qwen3", "<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        ("deepseek_r1", "why</think>so", "why", "so"),
        ("deepseek_r1", "a second <think> is no text", "a second  is no text", ""),
        ("glm45", "<think>\nwhy\n</think>\n\nso", "\nwhy", "\n\nso"),
        ("kimi_k2", "why \n\t</think>so", "why", "so"),
        ("kimi_k2", "why, \n and so on", "why, \n and so on", ""),
        ("kimi_k3", "why<|close|>think<|sep|><|open|>response<|sep|>so<|close|>response<|sep|>", "why", "so"),
        ("kimi_k3", "why<|open|>response<|sep|>so<|close|>response<|sep|><|close|>message<|sep|>", "why", "so"),
        ("minimax_m2", "why\n</think>\n\nso", "why", "\n\nso"),
        ("minimax_m3", "<mm:think>why</mm:think>so", "why", "so"),
        ("minimax_m3", "</mm:think>so", "", "so"),
        ("seed_oss", "<seed:think>why</seed:think>so", "why", "so"),
        ("mistral", "[THINK]why\n[/THINK]so", "why", "so"),
        ("mistral", "<think>\nwhy\n</think>\nso", "\nwhy", "\nso"),
        ("granite", "Here is my thought process: why Here is my response: so", " why ", " so"),
        ("granite", "Here's my thought process: why Here's my response: so", " why ", " so"),
        ("granite", "Here is my thought", "", "Here is my thought"),
        ("granite", "Here is my response: so", "", "Here is my response: so"),
        ("granite", "No. Here is my thought process: why", "", "No. Here is my thought process: why"),
        ("granite_thinking_parser", "why\n</think>\n\nso\n", "why", "so\n"),
        ("ernie45", "why\n</think>\n\n<response>\nso\n</response>\n", "why\n", "so"),
        ("ernie45", "why\n</think>\nso", "why\n", "so"),
        ("hunyuan_a13b", "<think>\nwhy\n</think>\n<answer>\nso\n</answer>", "why", "so"),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\nso\n</answer>", "", "so"),
        ("hunyuan_a13b", "<answer>\nso\n</answer>", "", "so"),
        ("gemma4", "<|channel>thought\nwhy\n<channel|>so", "why", "so"),
        ("gemma4", "<|channel>thoughts\n<channel|>so", "thoughts", "so"),
        ("gemma4", "<|channel>why<channel|>so", "why", "so"),
        ("gemma4", "<|channel>thou", "", ""),
        ("gemma4", "<|channel><channel|>so", "", "so"),
        ("cohere_command3", "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>so<|END_RESPONSE|>", "why", "so"),
        ("cohere_command4", "<|START_THINKING|>why<|END_THINKING|><|START_TEXT|>so<|END_TEXT|>", "why", "so"),
        ("plamo3", "why<|plamo:end_think:plamo|>so", "why", "so"),
        ("k2_horizon", "<ifm|think_fast>why</ifm|think_fast>so", "why", "so"),
        ("muse_glimmer", " to=self<|message|>why<|eom|><|start|>assistant to=user<|message|>so<|eot|>", "why", "so"),
        ("muse_glimmer", " to=user<|message|>so", "", "so"),
        (
            "inkling",
            "<|content_thinking|>why\n<|end_message|><|message_model|><|content_text|>so<|end_message|>",
            "why",
            "so",
        ),
        ("inkling", "note<|content_text|>so<|end_message|><|message_model|>more<|content_text|>, then", "", "so, then"),
    ],
)
def test_reasoning_and_content_are_told_apart(name: str, text: str, reasoning: str, content: str) -> None:
    assert thought(name, text) == (reasoning, content)


def test_text_between_blocks_is_content_if_no_block_follows_soon() -> None:
    assert thought("inkling", "plain words") == ("", "plain words")
    assert thought("inkling", "<|content_text|>so<|end_message|> \n") == ("", "so")
    assert thought("inkling", "<|content_text|>so<|end_message|>, then") == ("", "so, then")
    for length, kept in ((MAX_BLANK, ""), (MAX_BLANK + 1, "x" * (MAX_BLANK + 1))):
        assert thought("inkling", "x" * length + "<|content_text|>so") == ("", f"{kept}so")


@pytest.mark.parametrize("length", [1, MAX_BLANK, MAX_BLANK + 3])
def test_white_space_at_the_end_of_reasoning_is_dropped_up_to_a_bound(length: int) -> None:
    blank, kept = "\n" * length, "\n" * max(0, length - MAX_BLANK)
    assert thought("glm45", f"why{blank}</think>so") == (f"why{kept}", "so")
    assert thought("glm45", f"why{blank}") == (f"why{kept}", "")
    assert thought("glm45", f"why{blank}and") == (f"why{blank}and", "")


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
@given(data=st.data())
def test_pieces_of_any_size_say_the_same(row: ReasoningFormat, data: st.DataObject) -> None:
    begun = [marker[:-1] for marker in row.markers]
    words = [word for word in (*row.markers, *begun, row.label, "\n", " ", "a", "<", "<tool_call>", CALL) if word]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    scanner = MessageScanner(row, data.draw(st.sampled_from([None, TOOLS["hermes"]])))
    whole, _ = read(scanner, [text], row.begins)
    single, _ = read(scanner, list(text), row.begins)
    cut, _ = read(scanner, pieces_of(text, cuts), row.begins)
    assert whole == single == cut


@pytest.mark.parametrize("row", [row for row in ROWS if row.call_ends], ids=lambda row: row.name)
def test_a_call_ends_the_reasoning(row: ReasoningFormat) -> None:
    said, _ = read(MessageScanner(row, TOOLS["hermes"]), [f"why{CALL}"], "reasoning")
    assert (said.reasoning, said.calls) == ("why", [("f", "{}")])


@pytest.mark.parametrize("row", [row for row in ROWS if not row.call_ends and row.starts], ids=lambda row: row.name)
def test_a_call_in_the_reasoning_is_text_in_other_formats(row: ReasoningFormat) -> None:
    said, _ = read(MessageScanner(row, TOOLS["hermes"]), [f"why{CALL}"], "reasoning")
    assert (said.reasoning, said.calls) == (f"why{CALL}", [])


class Model:
    """A derenderer of a small tokenizer that has these tokens too."""

    def __init__(self, folder: Path, name: str, tokens: Sequence[str] = (), special: Sequence[str] = ()) -> None:
        self.tokenizer = byte_level(folder)
        self.tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
        self.tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.derenderer = Derenderer.load(folder, reasoning_parser=name)

    def says(self, text: str, prompt: str = "", **request: object) -> tuple[str | None, str | None]:
        """Reasoning and content of the whole output behind the prompt."""
        session = Session(
            self.derenderer,
            ChatCompletionRequest.model_validate(
                {"model": "m", "messages": [{"role": "user", "content": "?"}], **request}
            ),
            run="r",
            id="r",
            created=0,
            model="m",
            prompt_token_ids=self.tokenizer.encode(prompt).ids,
        )
        ids = self.tokenizer.encode(text).ids
        message = session.final([TokenChoice(index=0, token_ids=ids, finish_reason="stop")]).choices[0].message
        return message.reasoning, message.content


@pytest.mark.parametrize(
    ("name", "prompt", "first"),
    [
        ("qwen3", "<|im_start|>assistant\n", "reasoning"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "content"),
        ("qwen3", "<|im_start|>assistant\n<think>a</think>b<|im_end|>\n<|im_start|>assistant\n", "reasoning"),
        ("deepseek_r1", "a</think>b, then", "content"),
        ("deepseek_r1", "a</think>b, then <think>", "reasoning"),
        ("think", "hello", "content"),
        ("think", "hello <think>\n", "reasoning"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "reasoning"),
        ("gemma4", "<|channel>thought\na<|turn>model\n", "content"),
        ("kimi_k3", "<|open|>message<|sep|><|open|>think<|sep|>", "reasoning"),
        ("kimi_k3", "<|open|>message<|sep|><|open|>response<|sep|>", "content"),
        ("hunyuan_a13b", "hello<think>\n\n</think>\n", "content"),
        ("inkling", "<|message_model|><|content_thinking|>", "reasoning"),
        ("inkling", "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>", "content"),
    ],
)
@pytest.mark.parametrize("spelled", ["tokens", "text"])
def test_the_last_marker_of_the_turn_says_where_an_output_begins(
    tmp_path: Path, name: str, prompt: str, first: str, spelled: str
) -> None:
    row = REASONING[name]
    model = Model(tmp_path, name, (*row.markers, *row.turns) if spelled == "tokens" else ())
    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert model.says("words", prompt, **thinking) == (("words", None) if first == "reasoning" else (None, "words"))


def test_markers_of_an_earlier_turn_do_not_count(tmp_path: Path) -> None:
    model = Model(tmp_path, "poolside_v1", ("<assistant>",))
    assert model.says("words", "a</think>b<assistant>", chat_template_kwargs={"thinking": True}) == ("words", None)


@pytest.mark.parametrize(
    ("name", "request_fields", "thinks"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": None}}, True),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"chat_template_kwargs": {"thinking": True}}, True),
        ("holo2", {}, True),
        ("holo2", {"chat_template_kwargs": {"thinking": False}}, False),
        ("deepseek_v4", {"reasoning_effort": "none"}, False),
        ("deepseek_v4", {"reasoning_effort": "high"}, True),
        ("deepseek_v4", {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, False),
        ("hy_v3", {}, False),
        ("hy_v3", {"chat_template_kwargs": {"reasoning_effort": "high"}}, True),
        ("hy_v4", {}, True),
        ("hy_v4", {"chat_template_kwargs": {"reasoning_effort": "no_think"}}, False),
    ],
)
def test_a_request_turns_thinking_on_or_off(
    tmp_path: Path, name: str, request_fields: dict[str, object], thinks: bool
) -> None:
    text = "<think>why</think>so"
    right = ("why", "so") if thinks else (None, text)
    assert Model(tmp_path, name).says(text, **request_fields) == right


def test_the_markers_around_the_answer_are_no_content_with_thinking_off(tmp_path: Path) -> None:
    model = Model(tmp_path, "kimi_k3")
    text = "<|open|>response<|sep|>so<|close|>response<|sep|><|close|>message<|sep|>"
    assert model.says(text, chat_template_kwargs={"thinking": False}) == (None, "so")


def test_thoughts_that_are_left_in_the_content_get_their_start_back(tmp_path: Path) -> None:
    model = Model(tmp_path, "minimax_m2_append_think")
    assert model.says("why</think>so", "<think>\n") == (None, "<think>why</think>so")


def test_special_tokens_are_no_text_unless_they_are_markers_or_asked_for(tmp_path: Path) -> None:
    model = Model(tmp_path, "seed_oss", special=("<seed:think>", "</seed:think>", "<odd>"))
    text = "<seed:think>w<odd>hy</seed:think>s<odd>o<|im_end|>"
    assert model.says(text) == ("why", "so")
    assert model.says(text, skip_special_tokens=False) == ("w<odd>hy", "s<odd>o")


def test_a_checkpoints_own_suffix_is_read_from_its_vocabulary(tmp_path: Path) -> None:
    model = Model(tmp_path, "hy_v4", ("<think:6124c78e>", "</think:6124c78e>"))
    assert model.says("why</think:6124c78e>so", "<think:6124c78e>") == ("why", "so")


def test_of_two_spellings_of_a_marker_those_that_are_tokens_count(tmp_path: Path) -> None:
    low = ("<ifm|think_faster>", "</ifm|think_faster>")
    text = "<ifm|think>a</ifm|think_faster>b"
    assert Model(tmp_path / "some", "k2_horizon", low).says(text) == ("<ifm|think>a", "b")
    assert Model(tmp_path / "none", "k2_horizon").says(text) == ("a", "b")
