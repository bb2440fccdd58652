"""Reasoning formats: how a model sets its thinking apart from its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from headrace.workers.derender.formats.bodies import HARMONY

Begins = Literal["reasoning", "content", "begin", "between"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One way to set thinking apart.

    `starts`, `ends`: reasoning stands between any of these. `label`: a word that may follow a start and is no thought.
    `opens`, `closes`: markers around the answer. Behind one that closes stands a header: it is dropped if a marker
    follows soon, and content if none does.

    `begins`: what an output is from its first token, unless the prompt's last marker says otherwise: "begin" is
    reasoning if a start comes first of all and content if not; "between" is a header. `turns`: markers before the last
    of these in the prompt belong to an earlier turn. `switches`: template arguments that turn thinking on or off;
    `thinks`: what holds if none of them is given. Where it is off, starts and ends are text.

    `prose`: starts and ends are ordinary words, so they count only where they are due. `call_ends`: a tool call ends
    the reasoning, where others take the call's markup for part of the thought. `trim_reasoning`: white space at its
    end belongs to the markup; `trim_content`: so do line breaks before the answer. `lead`: text that the answer
    begins with, put there for models whose prompt ends with it. `suffixed`: a checkpoint's own suffix stands in its
    markers, as in <think:6124c78e>.

    `harmony`: the output is made of Harmony's messages, of which those of one channel are reasoning.

    `hints`: what the chat template of these models contains, all of it; the markers, where there are none.
    `model_types`: the model_type in their config.json, where it is another's template too.
    """

    name: str
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    label: str = ""
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    begins: Begins = "reasoning"
    turns: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    thinks: bool = True
    prose: bool = False
    call_ends: bool = False
    trim_reasoning: bool = False
    trim_content: bool = False
    lead: str = ""
    suffixed: bool = False
    harmony: bool = False
    hints: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """What a model writes in this format, besides words."""
        return (*self.starts, *self.ends, *self.opens, *self.closes)

    @property
    def off(self) -> ReasoningFormat | None:
        """What is left of the format where thinking is off: the markers around the answer, if there are any."""
        return replace(self, starts=(), ends=(), begins="content") if self.opens or self.closes else None


_THINK: Final = (("<think>",), ("</think>",))
_EITHER: Final = ("thinking", "enable_thinking")
_CHATML: Final = ("<|im_start|>", "<|im_end|>")
_GLM: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

_FORMATS: Final = (
    ReasoningFormat(
        "think",
        *_THINK,
        begins="content",
        call_ends=True,
        hints=("<think>", "</think>"),
    ),
    ReasoningFormat(
        "qwen3",
        *_THINK,
        turns=_CHATML,
        switches=("enable_thinking",),
        call_ends=True,
        hints=("<think>", "</think>", "enable_thinking", "<|im_start|>"),
        model_types=("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "mimo"),
        aliases=("mimo",),
    ),
    ReasoningFormat(
        "deepseek_r1",
        *_THINK,
        hints=("<think>", "</think>", "<｜Assistant｜>"),
        aliases=("olmo3", "step3"),
    ),
    ReasoningFormat(
        "deepseek_v3",
        *_THINK,
        switches=_EITHER,
        thinks=False,
        hints=("<think>", "</think>", "<｜Assistant｜>", "thinking is defined"),
        model_types=("deepseek_v3", "deepseek_v32"),
    ),
    ReasoningFormat("holo2", *_THINK, switches=_EITHER),
    ReasoningFormat(
        "deepseek_v4",
        *_THINK,
        switches=(*_EITHER, "reasoning_effort"),
        call_ends=True,
        trim_reasoning=True,
        hints=("<think>", "</think>", "<｜Assistant｜>", "thinking is defined", "drop_thinking"),
        model_types=("deepseek_v4", "deepseek_v41"),
        aliases=("deepseek_v41",),
    ),
    ReasoningFormat(
        "poolside_v1",
        *_THINK,
        turns=("<assistant>",),
        switches=_EITHER,
        thinks=False,
        hints=("<think>", "</think>", "<assistant>"),
    ),
    ReasoningFormat(
        "glm45",
        *_THINK,
        turns=_GLM,
        switches=_EITHER,
        call_ends=True,
        trim_reasoning=True,
        hints=("<think>", "</think>", "<arg_key>"),
        aliases=("glm47", "ling3"),
    ),
    ReasoningFormat(
        "kimi_k2",
        *_THINK,
        switches=_EITHER,
        call_ends=True,
        trim_reasoning=True,
        hints=("<think>", "</think>", "<|im_middle|>"),
    ),
    ReasoningFormat(
        "kimi_k3",
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
        opens=("<|open|>response<|sep|>",),
        closes=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        switches=_EITHER,
        hints=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ReasoningFormat(
        "minimax_m2",
        *_THINK,
        call_ends=True,
        trim_reasoning=True,
        hints=("<think>", "</think>", "<minimax:tool_call>"),
    ),
    ReasoningFormat(
        "minimax_m2_append_think",
        (),
        (),
        begins="content",
        lead="<think>",
    ),
    ReasoningFormat(
        "minimax_m3",
        ("<mm:think>",),
        ("</mm:think>",),
        begins="content",
        hints=("<mm:think>", "</mm:think>"),
    ),
    ReasoningFormat("minicpmv", *_THINK, turns=_CHATML, call_ends=True),
    ReasoningFormat(
        "seed_oss",
        ("<seed:think>",),
        ("</seed:think>",),
        turns=("<seed:bos>", "<seed:eos>"),
        switches=("enable_thinking",),
        call_ends=True,
        hints=("<seed:think>", "</seed:think>"),
    ),
    ReasoningFormat(
        "mistral",
        ("[THINK]", "<think>"),
        ("[/THINK]", "</think>"),
        begins="content",
        call_ends=True,
        trim_reasoning=True,
        hints=("[THINK]", "[/THINK]"),
    ),
    ReasoningFormat(
        "nemotron_v3",
        *_THINK,
        turns=_CHATML,
        switches=("enable_thinking",),
        call_ends=True,
        trim_reasoning=True,
        hints=("<think>", "</think>", "enable_thinking", "<|im_start|>", "truncate_history_thinking"),
        aliases=("nemotron",),
    ),
    ReasoningFormat(
        "step3p5",
        *_THINK,
        turns=_CHATML,
        call_ends=True,
        trim_reasoning=True,
        hints=("<think>", "</think>", "<|im_start|>", "<function="),
        model_types=("step3p5", "step3p7"),
    ),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        begins="begin",
        prose=True,
        hints=("Here is my thought process:", "Here is my response:"),
    ),
    ReasoningFormat(
        "granite_thinking_parser",
        *_THINK,
        turns=_CHATML,
        switches=("enable_thinking",),
        call_ends=True,
        trim_reasoning=True,
        trim_content=True,
        hints=("<think>", "</think>", "enable_thinking", "<|start_of_role|>"),
    ),
    ReasoningFormat(
        "ernie45",
        *_THINK,
        opens=("<response>",),
        closes=("\n</response>", "</response>"),
        trim_content=True,
        hints=("<think>", "</think>"),
        model_types=("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl"),
    ),
    ReasoningFormat(
        "hunyuan_a13b",
        ("<think>\n",),
        ("\n</think>\n<answer>\n",),
        opens=("</think>\n", "<answer>\n", "\n</answer>"),
        begins="content",
        hints=("<think>", "<answer>"),
        model_types=("hunyuan", "hunyuan_v1_moe", "hunyuan_v1_dense"),
    ),
    ReasoningFormat(
        "hy_v3",
        *_THINK,
        switches=("reasoning_effort",),
        thinks=False,
        suffixed=True,
        hints=("<think", "reasoning_effort", "'no_think'"),
        model_types=("hy_v3",),
    ),
    ReasoningFormat(
        "hy_v4",
        *_THINK,
        switches=("reasoning_effort",),
        suffixed=True,
        hints=("<think", "reasoning_effort", "'no_think'"),
        model_types=("hy_v4",),
    ),
    ReasoningFormat(
        "gemma4",
        ("<|channel>",),
        ("<channel|>",),
        label="thought\n",
        begins="content",
        turns=("<|turn>",),
        call_ends=True,
        trim_reasoning=True,
        hints=("<|channel>", "<channel|>"),
    ),
    ReasoningFormat(
        "cohere_command3",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        opens=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        closes=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        begins="content",
        turns=("<|CHATBOT_TOKEN|>",),
        call_ends=True,
        hints=("<|START_THINKING|>", "<|END_THINKING|>"),
        aliases=("cohere_command4",),
    ),
    ReasoningFormat(
        "plamo3",
        ("<|plamo:begin_think:plamo|>",),
        ("<|plamo:end_think:plamo|>",),
        turns=("<|plamo:tag|>",),
        switches=("enable_thinking",),
        call_ends=True,
        hints=("<|plamo:begin_think:plamo|>",),
    ),
    ReasoningFormat(
        "k2_horizon",
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        call_ends=True,
        hints=("<ifm|think>",),
    ),
    ReasoningFormat(
        "muse_glimmer",
        ("to=self<|message|>",),
        (),
        opens=("to=user<|message|>",),
        closes=("<|eom|>", "<|eot|>", "<|start|>"),
        begins="between",
        turns=("<|start|>assistant",),
        call_ends=True,
        hints=("to=self<|message|>",),
    ),
    ReasoningFormat(
        "inkling",
        ("<|content_thinking|>",),
        (),
        opens=("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
        closes=("<|end_message|>", "<|message_model|>", "<|content_model_end_sampling|>"),
        begins="between",
        turns=("<|message_model|>",),
        call_ends=True,
        trim_reasoning=True,
        hints=("<|content_thinking|>",),
    ),
    ReasoningFormat(
        "openai_gptoss",
        ("<|channel|>analysis<|message|>",),
        HARMONY,
        begins="content",
        harmony=True,
        hints=("<|channel|>analysis<|message|>",),
    ),
)

REASONING: Final = {name: row for row in _FORMATS for name in (row.name, *row.aliases)}
