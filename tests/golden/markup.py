"""Messages, and how each format writes them: what the vectors of this folder are recorded from.

`MESSAGES` is written in the markup of every format in `MARKUPS`, so what comes back must be the message again. Nothing
of the project is imported here: the recorder runs under the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]

ENGLISH = "The quick brown fox jumps over the lazy dog, and then it rests."
CHINESE = "你好，世界！今天天气怎么样？我觉得很不错。"
EMOJI = "Family 👩\u200d👩\u200d👧\u200d👦 and flag 🏳️\u200d🌈 ok 👍🏽!"
CODE = "def f(x: int) -> int:\n    if x < 2 and x > -1:\n        return x\n    return f(x-1) + f(x-2)  # fib\n"
SHORT = "OK, checking."

PARIS: Call = ("get_weather", {"city": "Paris", "unit": "c"})
TOKYO: Call = ("get_weather", {"city": "東京", "unit": "c"})
SEARCH: Call = (
    "search",
    {
        "query": "The quick brown fo",
        "filters": {"lang": "en", "range": {"from": 1, "to": [2, 3, {"x": None}]}},
        "limit": 5,
    },
)
TYPES: Call = (
    "search",
    {"query": "0", "limit": 3, "exact": False, "min_score": -1.5, "cursor": None, "tags": ["a", "b c"]},
)
ESCAPED: Call = ("search", {"query": 'He said "hi" \\ back/slash \t tab'})
WRITE: Call = ("write_file", {"path": "a/b.py", "content": 'def f():\n\treturn "x"\n\nprint(f())'})
LONG: Call = ("write_file", {"path": "long.txt", "content": f"{ENGLISH} {CHINESE} {EMOJI} " * 6})
PING: Call = ("ping", {})
UNKNOWN: Call = ("no_such_tool", {"q": SHORT})

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
        },
    }
    for name, properties in (
        (
            "get_weather",
            {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}, "days": {"type": "integer"}},
        ),
        (
            "search",
            {
                "query": {"type": "string"},
                "filters": {"type": "object"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "min_score": {"type": "number"},
                "cursor": {"type": ["string", "null"]},
            },
        ),
        ("write_file", {"path": {"type": "string"}, "content": {"type": "string"}}),
        ("ping", {}),
    )
]


class Said(NamedTuple):
    """One message: what the model thought, said and called. `cut`: only this part of its text came, in per cent."""

    kind: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    cut: int = 100
    request: Mapping[str, Any] = MappingProxyType({})


MESSAGES = (
    Said("content-ascii", content=ENGLISH),
    Said("content-chinese", content=CHINESE),
    Said("content-emoji", content=EMOJI),
    Said("content-code", content=CODE),
    Said("content-notools", content=f"{ENGLISH} {CHINESE}", request={"tools": None}),
    Said("content-anglebrackets", content='if a <b and c> d then <x> </x> <tool <think </th {"name": 1} [f(x)]'),
    Said("reasoning-ascii", reasoning=ENGLISH, content=SHORT),
    Said("reasoning-multibyte", reasoning=f"{CHINESE} {EMOJI}", content=EMOJI),
    Said("reasoning-code", reasoning=CODE, content=CHINESE),
    Said("reasoning-hidden", reasoning=ENGLISH, content=CHINESE, request={"include_reasoning": False}),
    Said("reasoning-cut", reasoning=ENGLISH, content="", cut=70),
    Said("reasoning-notools", reasoning=ENGLISH, content=SHORT, request={"tools": None}),
    Said("tool-one", calls=(PARIS,)),
    Said("tool-two", calls=(PARIS, SEARCH)),
    Said("tool-three", calls=(PARIS, WRITE, TOKYO)),
    Said("tool-nested", calls=(SEARCH,)),
    Said("tool-unicode", calls=(TOKYO,)),
    Said("tool-escaped", calls=(ESCAPED,)),
    Said("tool-newlines", calls=(WRITE,)),
    Said("tool-empty-args", calls=(PING,)),
    Said("tool-types", calls=(TYPES,)),
    Said("tool-longarg", calls=(LONG,)),
    Said("tool-unknown-name", calls=(UNKNOWN,)),
    Said("tool-content-before", content=SHORT, calls=(PARIS,)),
    Said("tool-choice-none", content=SHORT, calls=(PARIS,), request={"tool_choice": "none"}),
    Said("tool-parallel-false", calls=(PARIS, SEARCH), request={"parallel_tool_calls": False}),
    Said("tool-required", calls=(PARIS, SEARCH), request={"tool_choice": "required"}),
    Said("reason-tool", reasoning=ENGLISH, calls=(PARIS,)),
    Said("reason-content-tools", reasoning=SHORT, content=ENGLISH, calls=(SEARCH, PARIS)),
    Said("reason-tool-hidden", reasoning=ENGLISH, calls=(TOKYO,), request={"include_reasoning": False}),
    Said("trunc-30", calls=(SEARCH,), cut=30),
    Said("trunc-60", calls=(SEARCH,), cut=60),
    Said("trunc-85", calls=(SEARCH,), cut=85),
    Said("trunc-second", calls=(PARIS, SEARCH), cut=80),
)


class Markup(NamedTuple):
    """How one pair of formats writes a message."""

    reasoning_parser: str | None
    tool_parser: str | None
    calls: Callable[[tuple[Call, ...]], str] = lambda _: ""
    think: Callable[[str], str] | None = lambda reasoning: f"<think>\n{reasoning}\n</think>\n\n"
    answer: Callable[[str], str] = lambda content: content
    one_call: bool = False

    @property
    def name(self) -> str:
        """The vectors' file, without its ending."""
        return f"qwen3_more__{self.reasoning_parser or 'none'}+{self.tool_parser or 'none'}"

    def holds(self, said: Said) -> bool:
        """Whether the message can be written in these formats."""
        can_call, can_think = self.tool_parser or not said.calls, self.reasoning_parser or not said.reasoning
        return bool(can_call and can_think and self.text(said))

    def made(self, said: Said) -> tuple[Call, ...]:
        """The calls that the format can hold."""
        return said.calls[:1] if self.one_call else said.calls

    def text(self, said: Said) -> str:
        """The whole output."""
        parts = self.think(said.reasoning) if self.reasoning_parser and self.think else ""
        content = said.content if said.content or said.calls else ""
        whole = parts + (self.answer(content) if content else "") + (self.calls(self.made(said)) if said.calls else "")
        return whole[: len(whole) * said.cut // 100]


def compact(value: object) -> str:
    """JSON as the models write it."""
    return json.dumps(value, ensure_ascii=False)


def named(call: Call, key: str = "arguments") -> dict[str, Any]:
    """One call as the usual object."""
    return {"name": call[0], key: call[1]}


def listed(calls: tuple[Call, ...], key: str = "arguments") -> str:
    """All calls as one JSON list."""
    return compact([named(call, key) for call in calls])


def each(form: str, joint: str = "") -> Callable[[tuple[Call, ...]], str]:
    """Every call by itself as an object, in this form."""
    return lambda calls: joint.join(form.replace("%", compact(named(call))) for call in calls)


def raw(value: object) -> str:
    """A parameter's text: strings as they are, other values as JSON."""
    return value if isinstance(value, str) else compact(value)


def step3(calls: tuple[Call, ...]) -> str:
    """Step3's sections of steptml."""
    bodies = (
        f'<steptml:invoke name="{name}">'
        + "".join(f'<steptml:parameter name="{key}">{raw(value)}</steptml:parameter>' for key, value in given.items())
        + "</steptml:invoke>"
        for name, given in calls
    )
    inner = "".join(f"<｜tool_call_begin｜>function<｜tool_sep｜>{body}<｜tool_call_end｜>" for body in bodies)
    return f"<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>"


def dsml(section: str) -> Callable[[tuple[Call, ...]], str]:
    """DeepSeek's DSML."""

    def write(calls: tuple[Call, ...]) -> str:
        body = "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(
                f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
                f"{raw(value)}</｜DSML｜parameter>\n"
                for key, value in given.items()
            )
            + "</｜DSML｜invoke>\n"
            for name, given in calls
        )
        return f"<｜DSML｜{section}>\n{body}</｜DSML｜{section}>"

    return write


def python(calls: tuple[Call, ...], joint: str = ", ") -> str:
    """Calls as Python writes them."""
    return joint.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )


def qwen(calls: tuple[Call, ...]) -> str:
    """Qwen3-Coder's functions and parameters."""
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def mimo(calls: tuple[Call, ...]) -> str:
    """The same without line breaks, as MiMo writes it."""
    return "\n".join(
        f"<tool_call><function={name}>"
        + "".join(f"<parameter={key}>{raw(value)}</parameter>" for key, value in given.items())
        + "</function></tool_call>"
        for name, given in calls
    )


def dots(calls: tuple[Call, ...]) -> str:
    """Invocations as dots writes them."""
    body = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{raw(value)}</parameter>\n' for key, value in given.items())
        + "</invoke>\n"
        for name, given in calls
    )
    return f"<dots_function_call>\n{body}</dots_function_call>"


def keyed(tag: str, section: str, sep: str) -> Callable[[tuple[Call, ...]], str]:
    """Keys and values in sections, with a prefix to every tag."""

    def write(calls: tuple[Call, ...]) -> str:
        body = "\n".join(
            f"<{tag}tool_call>{name}{sep}"
            + "".join(
                f"<{tag}arg_key>{key}</{tag}arg_key>\n<{tag}arg_value>{raw(value)}</{tag}arg_value>\n"
                for key, value in given.items()
            )
            + f"</{tag}tool_call>"
            for name, given in calls
        )
        return f"<{section}>\n{body}\n</{section}>"

    return write


def plamo(calls: tuple[Call, ...]) -> str:
    """PLaMo's requests."""

    def tag(name: str) -> str:
        return f"<|plamo:{name}:plamo|>"

    body = "".join(
        f"{tag('begin_tool_request')}{tag('begin_tool_name')}{name}{tag('end_tool_name')}{tag('begin_tool_arguments')}"
        f"<|plamo:constrain|>json<|plamo:msg|>{compact(given)}{tag('end_tool_arguments')}{tag('end_tool_request')}"
        for name, given in calls
    )
    return f"{tag('begin_tool_requests')}{body}{tag('end_tool_requests')}"


def gemma(value: object) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return compact(value)


def glm(calls: tuple[Call, ...]) -> str:
    """GLM's keys and values, without line breaks, as GLM-4.7 writes them."""
    return "".join(
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{raw(value)}</arg_value>" for key, value in given.items())
        + "</tool_call>"
        for name, given in calls
    )


MARKUPS = (
    Markup(None, "jamba", lambda c: f"<tool_calls>{listed(c)}</tool_calls>"),
    Markup(
        None,
        "internlm",
        lambda c: f"<|action_start|><|plugin|>\n{compact(named(c[0], 'parameters'))}<|action_end|>\n",
        one_call=True,
    ),
    Markup(None, "phi4_mini_json", lambda c: f"functools{listed(c)}"),
    Markup(
        "step3",
        "step3",
        step3,
        think=lambda r: f"{r}\n</think>\n\n",
    ),
    Markup(None, "xlam", listed),
    Markup(None, "granite4", each("<tool_call>\n%\n</tool_call>", "\n")),
    Markup("deepseek_v3", "deepseek_v32", dsml("function_calls"), think=None),
    Markup("glm45", "glm47", glm),
    Markup(None, "llama4_json", each("%", "; ")),
    Markup(
        "mistral",
        "hermes",
        each("<tool_call>\n%\n</tool_call>", "\n"),
        think=lambda r: f"[THINK]{r}[/THINK]",
    ),
    Markup("olmo3", "olmo3", lambda c: f"<function_calls>{python(c, chr(10))}</function_calls>"),
    Markup(
        "ernie45",
        "ernie45",
        each("\n<tool_call>\n%\n</tool_call>\n"),
        think=lambda r: f"{r}\n</think>\n\n",
        answer=lambda content: f"<response>\n{content}\n</response>\n",
    ),
    Markup(
        "hunyuan_a13b",
        "hunyuan_a13b",
        lambda c: f"<tool_calls>{listed(c)}</tool_calls>",
        think=lambda r: f"<think>\n{r}\n</think>\n<answer>\n",
        answer=lambda content: f"{content}\n</answer>",
    ),
    Markup("nemotron_v3", "qwen3_coder", qwen, think=lambda r: f"{r}\n</think>\n"),
    Markup(
        "gemma4",
        "gemma4",
        lambda c: "".join(f"<|tool_call>call:{name}{gemma(given)}<tool_call|>" for name, given in c),
        think=lambda r: f"<|channel>thought\n{r}<channel|>",
    ),
    Markup(
        None,
        "longcat",
        each("<longcat_tool_call>%</longcat_tool_call>"),
    ),
    Markup(None, "granite-20b-fc", each("<function_call> %", "\n")),
    Markup(
        None,
        "lfm2",
        lambda c: f"<|tool_call_start|>[{python(c)}]<|tool_call_end|>",
    ),
    Markup(
        None,
        "apertus",
        lambda c: f"<|tools_prefix|>{compact([{name: given} for name, given in c])}<|tools_suffix|>",
    ),
    Markup(
        None,
        "gigachat3",
        lambda c: f"<|function_call|>{compact(named(c[0]))}",
        one_call=True,
    ),
    Markup("mimo", "mimo", mimo),
    Markup("step3p5", "step3p5", qwen, think=lambda r: f"{r}\n</think>\n"),
    Markup(None, "dots", dots),
    Markup("deepseek_v4", "deepseek_v4", dsml("tool_calls"), think=lambda r: f"{r}</think>"),
    Markup(None, "k2_horizon", keyed("ifm|", "ifm|tool_calls", "\n")),
    Markup(
        "plamo3",
        "plamo3",
        plamo,
        think=lambda r: f"<|plamo:begin_think:plamo|>{r}<|plamo:end_think:plamo|>",
    ),
    Markup(
        None,
        "functiongemma",
        lambda c: "".join(
            f"<start_function_call>call:{name}{{"
            + ",".join(f"{key}:<escape>{raw(value)}<escape>" for key, value in given.items())
            + "}<end_function_call>"
            for name, given in c
        ),
    ),
    Markup(
        "kimi_k3",
        None,
        think=lambda r: f"{r}<|close|>think<|sep|>",
        answer=lambda content: f"<|open|>response<|sep|>{content}<|close|>response<|sep|>",
    ),
    Markup(
        "minimax_m3",
        None,
        think=lambda r: f"<mm:think>{r}</mm:think>",
    ),
    Markup(
        "k2_horizon",
        None,
        think=lambda r: f"<ifm|think>{r}</ifm|think>",
    ),
    Markup("hy_v4", None, think=lambda r: f"{r}</think:6124c78e>"),
    Markup(
        "inkling",
        None,
        think=lambda r: f"<|content_thinking|>{r}<|end_message|><|message_model|>",
        answer=lambda content: f"<|content_text|>{content}<|end_message|>",
    ),
    Markup(
        "muse_glimmer",
        None,
        think=lambda r: f" to=self<|message|>{r}<|eom|><|start|>assistant",
        answer=lambda content: f" to=user<|message|>{content}<|eot|>",
    ),
    Markup("granite_thinking_parser", None, think=lambda r: f"{r}\n</think>\n"),
    Markup("minicpmv", None),
    Markup("holo2", None),
    Markup("deepseek_v4", None, think=lambda r: f"{r}</think>"),
    Markup("poolside_v1", "poolside_v1", glm, think=None),
)
"""The formats that the shared vectors do not cover."""

MARKERS = (
    "<tool_calls>",
    "</tool_calls>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
    "<tool_call>",
    "</tool_call>",
    "｜DSML｜",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|python_tag|>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<response>",
    "</response>",
    "<0x0A>",
    "<think>",
    "</think>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|role_sep|>",
    "<|message_sep|>",
    "<|function_call|>",
    "<tool_sep>",
    "<dots_function_call>",
    "</dots_function_call>",
    "<|plamo:begin_tool_requests:plamo|>",
    "<|plamo:end_tool_requests:plamo|>",
    "<|plamo:begin_tool_request:plamo|>",
    "<|plamo:end_tool_request:plamo|>",
    "<|plamo:begin_tool_name:plamo|>",
    "<|plamo:end_tool_name:plamo|>",
    "<|plamo:begin_tool_arguments:plamo|>",
    "<|plamo:end_tool_arguments:plamo|>",
    "<|plamo:constrain:plamo|>",
    "<|plamo:msg:plamo|>",
    "<|plamo:begin_think:plamo|>",
    "<|plamo:end_think:plamo|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<mm:think>",
    "</mm:think>",
    "<ifm|think>",
    "</ifm|think>",
    "<think:6124c78e>",
    "</think:6124c78e>",
    "<|message_model|>",
    "<|content_thinking|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "<|plamo:constrain|>",
    "<|plamo:msg|>",
    "<assistant>",
)
"""Tokens that are added to the tokenizer. Their ids are in the vectors: append only."""
