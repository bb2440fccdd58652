"""The render core: a chat or completion request in, a GenerateRequest out. Pure; no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import ValidationError
from tokenizers import Tokenizer

from headrace.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from headrace.protocol.base import JsonObject
from headrace.protocol.errors import BadRequest, bad_request
from headrace.workers.models import ModelSpec
from headrace.workers.render.template import ChatTemplate

Asked: TypeAlias = ChatCompletionRequest | CompletionRequest

_PIECE: Final = 1 << 16
"""Characters of a huge text that are encoded at a time."""
_CUT_TOKENS: Final = 64
"""Tokens that a piece may have more than its part of the whole, since it was cut out."""
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, with the field that has it."""
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Renderer:
    """Turns requests for one model into token ids. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, template: ChatTemplate | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len

    @classmethod
    def load(cls, spec: ModelSpec) -> Renderer:
        """Reads tokenizer and chat template from the model's folder. Raises FileNotFoundError by name."""
        file = spec.path / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"model {spec.name!r} has no tokenizer.json in its folder")
        config = _json(spec.path / "tokenizer_config.json")
        specials = {name: token for name in _SPECIALS if (token := _text(config.get(name))) is not None}
        source = _template_source(spec.path, config)
        template = None if source is None else ChatTemplate(source, specials=specials)
        return cls(Tokenizer.from_file(str(file)), template=template, max_model_len=spec.model_len())

    def chat(self, body: bytes) -> GenerateRequest:
        """The generate request of a chat completion request (JSON). Raises BadRequest naming the field."""
        request = _parse(ChatCompletionRequest, body)
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; use /v1/completions", param="messages")
        if request.chat_template is not None:
            raise BadRequest("chat_template: templates from requests are not allowed here", param="chat_template")
        if request.tools and request.tool_choice not in ("auto", "none", None):
            message = "tool_choice: only 'auto' and 'none' are served; a forced call needs structured outputs"
            raise BadRequest(message, param="tool_choice")
        text = self._template.render(
            [_message(*numbered, parts=self._template.reads_parts) for numbered in enumerate(request.messages)],
            tools=_tools(request),
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            extra=request.chat_template_kwargs or {},
        )
        ids, offsets = self._encode(text, request)
        return self._request(request, ids, offsets)

    def completion(self, body: bytes) -> GenerateRequest:
        """The generate request of a completion request (JSON) with one prompt. Raises BadRequest naming the field."""
        request = _parse(CompletionRequest, body)
        prompts = request.prompts()
        if len(prompts) != 1:
            message = f"prompt: one prompt a request is served, got {len(prompts)}; send one request for each"
            raise BadRequest(message, param="prompt")
        if request.echo:
            raise BadRequest("echo: the prompt's text and logprobs are not served yet", param="echo")
        prompt = prompts[0]
        if isinstance(prompt, str):
            ids, offsets = self._encode(prompt, request)
        else:
            ids, offsets = prompt, None
        if not ids:
            raise BadRequest("prompt: must have at least 1 token, got 0", param="prompt")
        return self._request(request, ids, offsets)

    def _encode(self, text: str, request: Asked) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of the text, with their places in it; of a text that is far too long, those of a part that is so."""
        kept = _kept(request)
        most = self._max_model_len if kept is None else min(kept, self._max_model_len)
        part = self._enough(text, most, at_end=kept is not None and not _from_start(request))
        encoding = self._tokenizer.encode(text[part], add_special_tokens=request.add_special_tokens)
        if part.start == 0:
            return encoding.ids, encoding.offsets
        return encoding.ids, [(start + part.start, end + part.start) for start, end in encoding.offsets]

    def _enough(self, text: str, tokens: int, *, at_end: bool) -> slice:
        """A beginning of the text, or an end, that surely has more tokens; all of it where none is known to.

        A token takes 400 bytes of memory while it is encoded: those of a text of 16 MiB would take gigabytes.
        """
        whole = slice(0, len(text))
        if len(text) <= 8 * tokens + _PIECE:
            return whole
        found = 0
        for done in range(0, len(text), _PIECE):
            part = slice(max(0, len(text) - done - _PIECE), len(text)) if at_end else slice(0, done + _PIECE)
            piece = text[part][:_PIECE] if at_end else text[part][done:]
            found += len(self._tokenizer.encode(piece, add_special_tokens=False).ids) - _CUT_TOKENS
            if found > tokens:
                return part
        return whole

    def _request(
        self, request: Asked, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None
    ) -> GenerateRequest:
        ids, offsets = _truncated(request, ids, offsets)
        if len(ids) >= self._max_model_len:
            name = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
            message = (
                f"{name}: the prompt has at least {len(ids)} tokens; with 1 output token that is over the model's "
                f"{self._max_model_len}"
            )
            raise BadRequest(message, param=name)
        wanted: JsonObject = {
            "request_id": request.request_id,
            "token_ids": list(ids),
            "sampling_params": request.to_sampling_params(None),
            "model": request.model,
            "stream": bool(request.stream),
        }
        if request.return_token_offsets and offsets is not None:
            wanted["token_offsets"] = [list(span) for span in offsets]
        if isinstance(request, ChatCompletionRequest) and request.chat_template_kwargs:
            wanted["reasoning_parser_kwargs"] = {"chat_template_kwargs": request.chat_template_kwargs}
        if request.stream_options is not None:
            wanted["stream_options"] = request.stream_options.model_dump(mode="json")
        for name in ("return_token_ids", "cache_salt", "priority", "kv_transfer_params", "ec_transfer_params"):
            if name in request.model_fields_set:
                wanted[name] = getattr(request, name)
        try:
            return GenerateRequest.model_validate(wanted)
        except ValidationError as error:
            raise bad_request(error) from None


def _truncated(
    request: Asked, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None
) -> tuple[Sequence[int], Sequence[tuple[int, int]] | None]:
    """The prompt cut to truncate_prompt_tokens: its end is kept, or its beginning with truncation_side="right"."""
    kept = _kept(request)
    if kept is None or len(ids) <= kept:
        return ids, offsets
    part = slice(0, kept) if _from_start(request) else slice(len(ids) - kept, len(ids))
    return ids[part], None if offsets is None else offsets[part]


def _kept(request: Asked) -> int | None:
    """How many tokens of the prompt the client wants at most."""
    kept = request.truncate_prompt_tokens
    return None if kept is None or kept < 0 else kept


def _from_start(request: Asked) -> bool:
    return request.truncation_side == "right"


R = TypeVar("R", ChatCompletionRequest, CompletionRequest)


def _parse(kind: type[R], body: bytes) -> R:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None


def _message(number: int, message: Mapping[str, Any], *, parts: bool) -> dict[str, Any]:
    """A message as its template expects it: tool-call arguments as an object, where they are the JSON of one.

    Text parts stay parts where the template reads them, else they become lines of one text, as in vLLM.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := plain.get("content"), list):
        texts = [_text_of(part, f"messages.{number}.content.{place}") for place, part in enumerate(content)]
        plain["content"] = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _text_of(part: object, param: str) -> str:
    """The text of a part of a message's content. Raises BadRequest for a picture, a sound, a file."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if isinstance(part, dict) and field is not None else None
    if not isinstance(text, str):
        raise BadRequest(f"{param}: only text parts are served, got one of type {kind!r}", param=param)
    return text


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            message = "messages: the arguments of a tool call must be a JSON object"
            raise BadRequest(message, param="messages") from None
    return {**call, "function": function}


def _tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(mode="json", exclude_unset=True) for tool in request.tools]


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _text(token: object) -> str | None:
    """A special token is written as its text or as an object that has it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
