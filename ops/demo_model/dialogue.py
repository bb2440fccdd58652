"""What a training chat is, and how it becomes text: the shipped chat template is the only source of that."""

import json
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from headrace.demo_model import PATH
from headrace.workers.render.template import ChatTemplate

TEMPLATE = (PATH / "chat_template.jinja").read_text(encoding="utf-8")


class Property(TypedDict):
    type: str
    description: NotRequired[str]
    enum: NotRequired[list[str]]


class Parameters(TypedDict):
    type: str
    properties: dict[str, Property]
    required: list[str]


class Function(TypedDict):
    name: str
    description: NotRequired[str]
    parameters: Parameters


class Tool(TypedDict):
    """A tool as it is offered in a chat request."""

    type: str
    function: Function


class FunctionCall(TypedDict):
    name: str
    arguments: dict[str, str]


class ToolCall(TypedDict):
    type: str
    function: FunctionCall


class Message(TypedDict):
    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat that is to be continued: what was said and offered, the thought, and the answer."""

    messages: list[Message]
    tools: list[Tool] | None
    thought: str
    answer: Message


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str = "", calls: list[ToolCall] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return message


def tool_call(name: str, arguments: dict[str, str]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_SERVED = ChatTemplate(TEMPLATE, specials={})


def render_prompt(messages: list[Message], tools: list[Tool] | None, think: bool) -> str:
    """The prompt up to where the model goes on, rendered as the render workers do."""
    return _SERVED.render(
        messages,
        tools=tools,
        documents=None,
        add_generation_prompt=True,
        continue_final_message=False,
        extra={"enable_thinking": think},
    )


def render_answer(chat: Chat) -> str:
    """The answer without its thought, up to and with the end-of-turn token."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in chat.answer.get("tool_calls", ())]
    blocks = [chat.answer["content"]] if chat.answer["content"] else []
    blocks += [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join(blocks) + "<|im_end|>"


def render_continuation(chat: Chat, think: bool) -> str:
    """Everything that the model is to write after `render_prompt(..., think)`."""
    thought = f"<think>\n{chat.thought}\n</think>\n\n" if think else ""
    return thought + render_answer(chat)
