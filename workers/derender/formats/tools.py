"""Tool-call formats: how a model writes the calls that it makes.

A row names the markers at which calls begin, and the body behind them, which is of one of a few kinds (bodies.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from headrace.workers.derender.formats.bodies import (
    HARMONY,
    Body,
    GemmaBody,
    HarmonyBody,
    Header,
    JsonBody,
    NamedBody,
    PythonBody,
    XmlBody,
)
from headrace.workers.derender.formats.markup import strings

CallIds = Literal["openai", "kimi", "mistral"]
Unasked = Literal["content", "dropped", "calls"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    `starts`: any of these begins a section of calls; `bare`: so do these, but not within reasoning. `strays`:
    markers that say nothing where they stand alone. `text_after`: whether text behind the first call is content; where
    it is not, it is dropped. `tentative`: other text may follow a start, too: it is content if it is no call, and so
    is the start if it is a bare one. `forced_json`: when a call is demanded ("required" or by name), the model is made
    to write it as plain JSON instead. `unasked`: what becomes of calls where the request allows none: their markup is
    content, or they are dropped, or (without tools, not with the choice "none") they are calls all the same. `ids`: the
    model family's own style of call ids. `suffixed`: a checkpoint's own suffix stands in the markers.

    `hints`: what the chat template of these models contains, all of it; the markers, where there are none.
    `model_types`: the model_type in their config.json, where it is another's template too.
    """

    name: str
    starts: tuple[str, ...]
    body: Body
    bare: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    text_after: bool = False
    tentative: bool = False
    forced_json: bool = False
    unasked: Unasked = "content"
    ids: CallIds = "openai"
    suffixed: bool = False
    hints: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that the format is written with."""
        return (*self.starts, *self.bare, *self.strays, *strings(self.body))


_QWEN_XML: Final = XmlBody(
    call="<function=",
    name_end=">",
    param="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    around=("\n", "\n"),
)
_GLM_XML: Final = XmlBody(
    call="<tool_call>",
    param="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
_INVOKE_XML: Final = XmlBody(
    call="<invoke name=",
    name_end=">",
    param="<parameter name=",
    key_end=">",
    value_end="</parameter>",
    call_end="</invoke>",
    end="</minimax:tool_call>",
    attributes=True,
)


def _dsml(space: str, section: str) -> XmlBody:
    return XmlBody(
        call=f"<｜DSML｜{space}invoke name=",
        name_end=">",
        param=f"<｜DSML｜{space}parameter name=",
        key_end=">",
        value_end=f"</｜DSML｜{space}parameter>",
        call_end=f"</｜DSML｜{space}invoke>",
        end=f"</｜DSML｜{space}{section}>",
        attributes=True,
        text_mark='string="true"',
    )


_HERMES: Final = ("<tool_call>", "</tool_call>", '"arguments"')

_FORMATS: Final = (
    ToolFormat("hermes", ("<tool_call>",), JsonBody(("</tool_call>",)), hints=_HERMES, aliases=("qwen3_json",)),
    ToolFormat(
        "granite4",
        ("<tool_call>",),
        JsonBody(("</tool_call>",)),
        strays=("</tool_call>",),
        text_after=True,
        forced_json=True,
        hints=(*_HERMES, "<|start_of_role|>"),
    ),
    ToolFormat(
        "ernie45",
        ("<tool_call>",),
        JsonBody(("</tool_call>",)),
        forced_json=True,
        hints=_HERMES,
        model_types=("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl"),
    ),
    ToolFormat("longcat", ("<longcat_tool_call>",), JsonBody(("</longcat_tool_call>",))),
    ToolFormat(
        "internlm",
        ("<|action_start|><|plugin|>",),
        JsonBody(("<|action_end|>",)),
        forced_json=True,
        aliases=("internlm2",),
    ),
    ToolFormat(
        "granite",
        ("<|tool_call|>", "<tool_call>"),
        JsonBody(),
        forced_json=True,
        hints=("<|tool_call|>", "<|start_of_role|>"),
    ),
    ToolFormat("granite-20b-fc", ("<function_call>",), JsonBody(), forced_json=True),
    ToolFormat("jamba", ("<tool_calls>",), JsonBody(("</tool_calls>",)), forced_json=True),
    ToolFormat(
        "hunyuan_a13b",
        ("<tool_calls>",),
        JsonBody(("</tool_calls>",)),
        forced_json=True,
        model_types=("hunyuan", "hunyuan_v1_moe", "hunyuan_v1_dense"),
    ),
    ToolFormat(
        "apertus",
        ("<|tools_prefix|>",),
        JsonBody(("<|tools_suffix|>",), keyed=True),
        strays=("<|tools_suffix|>",),
        text_after=True,
        forced_json=True,
    ),
    ToolFormat(
        "gigachat3",
        (
            "<|function_call|>",
            "function call<|role_sep|>\n",
            "<|message_sep|>function call<|role_sep|>\n",
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        ),
        JsonBody(),
        forced_json=True,
        hints=("function call", "<|role_sep|>", "<|message_sep|>"),
    ),
    ToolFormat(
        "cohere_command3",
        ("<|START_ACTION|>",),
        JsonBody(
            ("<|END_ACTION|>",),
            name_keys=frozenset({"tool_name"}),
            id_keys=frozenset({"tool_call_id"}),
        ),
        aliases=("cohere_command4",),
    ),
    ToolFormat(
        "inkling",
        ("<|content_invoke_tool_json|>",),
        JsonBody(("<|end_message|>", "<|content_model_end_sampling|>"), argument_keys=frozenset({"args"})),
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        JsonBody(id_keys=frozenset({"id"}), header=Header("[CALL_ID]", "[ARGS]")),
        forced_json=True,
        unasked="dropped",
        ids="mistral",
        hints=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        "llama3_json",
        ("<|python_tag|>",),
        JsonBody(),
        bare=("{", "["),
        tentative=True,
        hints=('{"name": function name, "parameters": dictionary',),
        aliases=("llama4_json",),
    ),
    ToolFormat(
        "phi4_mini_json",
        ("<|tool_call|>",),
        JsonBody(),
        bare=("functools[",),
        tentative=True,
        forced_json=True,
        hints=("<|tool|>", "<|/tool|>"),
    ),
    ToolFormat(
        "xlam",
        ("[TOOL_CALLS]", "<tool_call>"),
        JsonBody(),
        bare=("[{", "[ {", "[\n{", "[\n  {", "[\n    {", "```json", "```\n"),
        tentative=True,
        forced_json=True,
    ),
    ToolFormat(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>",),
        bare=("<｜tool▁call▁begin｜>",),
        strays=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        body=NamedBody(
            "<｜tool▁call▁begin｜>",
            "\n```json\n",
            end="```",
            section_end="<｜tool▁calls▁end｜>",
            before_name="<｜tool▁sep｜>",
        ),
        hints=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ToolFormat(
        "deepseek_v31",
        ("<｜tool▁calls▁begin｜>",),
        bare=("<｜tool▁call▁begin｜>",),
        strays=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        body=NamedBody(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
            section_end="<｜tool▁calls▁end｜>",
        ),
        hints=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        bare=("<|tool_call_begin|>",),
        strays=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        unasked="dropped",
        body=NamedBody(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            section_end="<|tool_calls_section_end|>",
            numbered=True,
        ),
        ids="kimi",
    ),
    ToolFormat(
        "plamo3",
        ("<|plamo:begin_tool_requests:plamo|>",),
        bare=("<|plamo:begin_tool_request:plamo|>",),
        strays=("<|plamo:end_tool_request:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
        body=NamedBody(
            "<|plamo:begin_tool_request:plamo|>",
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
            end="<|plamo:end_tool_arguments:plamo|>",
            section_end="<|plamo:end_tool_requests:plamo|>",
            before_name="<|plamo:begin_tool_name:plamo|>",
        ),
        text_after=True,
        unasked="dropped",
    ),
    ToolFormat(
        "qwen3_coder",
        ("<tool_call>",),
        _QWEN_XML,
        bare=("<function=",),
        strays=("</tool_call>",),
        text_after=True,
        unasked="dropped",
        aliases=("qwen3_xml", "step3p5"),
    ),
    ToolFormat(
        "mimo",
        ("<tool_call>",),
        replace(_QWEN_XML, around=("", "")),
        bare=("<function=",),
        strays=("</tool_call>",),
        text_after=True,
        unasked="dropped",
    ),
    ToolFormat(
        "seed_oss",
        ("<seed:tool_call>",),
        replace(_QWEN_XML, end="</seed:tool_call>"),
        bare=("<function=",),
        strays=("</seed:tool_call>",),
        text_after=True,
        forced_json=True,
        unasked="dropped",
    ),
    ToolFormat(
        "glm45",
        ("<tool_call>",),
        _GLM_XML,
        text_after=True,
        unasked="dropped",
        aliases=("glm47", "ling3"),
    ),
    ToolFormat("poolside_v1", ("<tool_call>",), _GLM_XML, text_after=True, hints=(*strings(_GLM_XML), "<assistant>")),
    ToolFormat(
        "hy_v3",
        ("<tool_calls>",),
        replace(_GLM_XML, name_end="<tool_sep>", end="</tool_calls>"),
        forced_json=True,
        suffixed=True,
        hints=("<tool_calls", "<tool_sep"),
        model_types=("hy_v3",),
    ),
    ToolFormat(
        "hy_v4",
        ("<tool_calls>",),
        replace(_GLM_XML, end="</tool_calls>"),
        suffixed=True,
        hints=("<tool_calls", "<arg_key"),
        model_types=("hy_v4",),
    ),
    ToolFormat(
        "k2_horizon",
        ("<ifm|tool_calls>",),
        XmlBody(
            call="<ifm|tool_call>",
            param="<ifm|arg_key>",
            key_end="</ifm|arg_key>",
            value="<ifm|arg_value>",
            value_end="</ifm|arg_value>",
            call_end="</ifm|tool_call>",
            end="</ifm|tool_calls>",
        ),
        strays=("</ifm|tool_call>", "</ifm|tool_calls>"),
        text_after=True,
    ),
    ToolFormat(
        "minimax_m2",
        ("<minimax:tool_call>",),
        _INVOKE_XML,
        bare=("<invoke name=",),
        strays=("</minimax:tool_call>",),
        text_after=True,
        unasked="dropped",
    ),
    ToolFormat("dots", ("<dots_function_call>",), replace(_INVOKE_XML, end="</dots_function_call>")),
    ToolFormat(
        "muse_glimmer",
        ("<atem:function_calls>",),
        XmlBody(
            call="<atem:invoke name=",
            name_end=">",
            param="<atem:parameter name=",
            key_end=">",
            value_end="</atem:parameter>",
            call_end="</atem:invoke>",
            end="</atem:function_calls>",
            attributes=True,
        ),
    ),
    ToolFormat(
        "minicpm5",
        (),
        XmlBody(
            call="<function name=",
            name_end=">",
            param="<param name=",
            key_end=">",
            value_end="</param>",
            call_end="</function>",
            attributes=True,
            around=("<![CDATA[", "]]>"),
        ),
        bare=("<function name=",),
        text_after=True,
        forced_json=True,
    ),
    ToolFormat(
        "kimi_k3",
        ("<|open|>tools<|sep|>",),
        XmlBody(
            call="<|open|>call tool=",
            name_end="<|sep|>",
            param="<|open|>argument key=",
            key_end="<|sep|>",
            value_end="<|close|>argument<|sep|>",
            call_end="<|close|>call<|sep|>",
            end="<|close|>tools<|sep|>",
            attributes=True,
            text_mark='type="string"',
        ),
        hints=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ToolFormat(
        "deepseek_v32",
        ("<｜DSML｜function_calls>",),
        _dsml("", "function_calls"),
        bare=("<｜DSML｜invoke name=",),
        hints=("｜DSML｜", "function_calls>"),
    ),
    ToolFormat(
        "deepseek_v4",
        ("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
        _dsml("", "tool_calls"),
        bare=("<｜DSML｜invoke name=",),
        unasked="dropped",
        hints=("｜DSML｜", "tool_calls>"),
    ),
    ToolFormat(
        "deepseek_v41",
        ("<｜DSML｜ calls>",),
        _dsml(" ", "calls"),
        bare=("<｜DSML｜ invoke name=",),
        unasked="dropped",
        hints=("｜DSML｜", " calls>"),
    ),
    ToolFormat(
        "step3",
        ("<｜tool_calls_begin｜>",),
        XmlBody(
            call="<steptml:invoke name=",
            name_end=">",
            param="<steptml:parameter name=",
            key_end=">",
            value_end="</steptml:parameter>",
            call_end="<｜tool_call_end｜>",
            end="<｜tool_calls_end｜>",
            attributes=True,
        ),
        strays=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        text_after=True,
        forced_json=True,
    ),
    ToolFormat("pythonic", (), PythonBody(), bare=("[",), tentative=True, forced_json=True),
    ToolFormat(
        "llama4_pythonic",
        ("<|python_start|>",),
        PythonBody("<|python_end|>"),
        bare=("[",),
        strays=("<|python_end|>",),
        tentative=True,
        forced_json=True,
        hints=("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat(
        "olmo3",
        ("<function_calls>",),
        PythonBody("</function_calls>", listed=False),
        strays=("</function_calls>",),
        forced_json=True,
    ),
    ToolFormat(
        "lfm2",
        ("<|tool_call_start|>",),
        PythonBody("<|tool_call_end|>"),
        strays=("<|tool_call_end|>",),
        text_after=True,
        forced_json=True,
        hints=("<|im_start|>", "List of tools: "),
    ),
    ToolFormat(
        "gemma4",
        ("<|tool_call>",),
        GemmaBody("<tool_call|>", '<|"|>'),
        strays=("<tool_call|>",),
        text_after=True,
        unasked="dropped",
    ),
    ToolFormat(
        "functiongemma",
        ("<start_function_call>",),
        GemmaBody("<end_function_call>", "<escape>", typed=True),
        strays=("<end_function_call>",),
        forced_json=True,
    ),
    ToolFormat(
        "openai",
        HARMONY,
        HarmonyBody(),
        text_after=True,
        unasked="calls",
        hints=("<|channel|>", "<|message|>", "<|call|>"),
    ),
)

TOOLS: Final = {name: row for row in _FORMATS for name in (row.name, *row.aliases)}
