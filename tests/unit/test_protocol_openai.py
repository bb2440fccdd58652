"""The OpenAI requests: what is refused and how it is said, and the sampling parameters that come out."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from headrace.protocol import ChatCompletionRequest, CompletionRequest, SamplingParams, bad_request

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}

CHAT_REFUSED = [
    ({}, "messages", "messages is required."),
    ({"messages": []}, "messages", "messages must not be empty."),
    ({"messages": "hi"}, "messages", "messages must be a list."),
    ({"messages": [{}]}, "messages.0.role", "messages.0.role is required."),
    (
        {"messages": [{"role": "", "content": "a"}]},
        "messages.0.role",
        "messages.0.role must not be empty.",
    ),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "a user message must have content"),
    (
        {"messages": [{"role": "user", "content": 1}]},
        "messages.0.content",
        "messages.0.content must be a string or a list of content parts.",
    ),
    (
        {"messages": [{"role": "user", "content": [1]}]},
        "messages.0.content.0",
        "messages.0.content.0 must be a string or a content part.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "a text part must have its text",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages.0.tool_calls.0.function",
        "messages.0.tool_calls.0.function is required.",
    ),
    (
        {"top_logprobs": 1},
        "top_logprobs",
        "when using `top_logprobs`, `logprobs` must be set to true.",
    ),
    (
        {"logprob_token_ids": [1]},
        "logprob_token_ids",
        "when using `logprob_token_ids`, `logprobs` must be set to true.",
    ),
    (
        {"tools": []},
        "tools",
        "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
    ),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is required."),
    (
        {"tools": [{"function": {"name": ""}}]},
        "tools.0.function.name",
        "tools.0.function.name must not be empty.",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
    (
        {"tool_choice": "maybe", "tools": [TOOL]},
        "tool_choice",
        "tool_choice must be 'none', 'auto' or 'required'.",
    ),
    (
        {"tool_choice": {"type": "function"}, "tools": [TOOL]},
        "tool_choice.function",
        "tool_choice.function is required.",
    ),
    (
        {"tool_choice": {"function": {"name": ""}}, "tools": [TOOL]},
        "tool_choice.function.name",
        "tool_choice.function.name must not be empty.",
    ),
    (
        {"tool_choice": {"function": {"name": "other"}}, "tools": [TOOL]},
        "tool_choice",
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
    ),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
    ),
    (
        {"reasoning_effort": "huge"},
        "reasoning_effort",
        "reasoning_effort must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'.",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1, got 0."),
    (
        {"max_completion_tokens": 2, "min_tokens": 3},
        "min_tokens",
        "min_tokens must be less than or equal to max_tokens=2, got 3.",
    ),
]

# Rules that both requests have; each is tried on both.
SHARED_REFUSED = [
    ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling, got 2."),
    ({"temperature": -1.0}, "temperature", "temperature must be non-negative, got -1.0."),
    ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0.0."),
    ({"stop": ["a", ""]}, "stop.1", "stop cannot contain an empty string."),
    (
        {"logit_bias": {"x": 1}},
        "logit_bias.x",
        "logit_bias.x must be an integer.",
    ),
    ({"stream_options": {}}, "stream_options", "Stream options can only be defined when `stream=True`."),
    (
        {"stream": True, "prompt_logprobs": 1},
        "prompt_logprobs",
        "`prompt_logprobs` are not available when `stream=True`.",
    ),
    ({"use_beam_search": True}, "use_beam_search", "`use_beam_search` is not supported."),
    (
        {"routed_experts_prompt_start": -1},
        "routed_experts_prompt_start",
        "routed_experts_prompt_start must be at least 0.",
    ),
    ({"priority": 2**63}, "priority", "priority must be at most 9223372036854775807."),
    (
        {"cache_salt": ""},
        "cache_salt",
        "Parameter 'cache_salt' must be a non-empty string if provided.",
    ),
    ({"cache_salt": "a" * 1025}, "cache_salt", "cache_salt must have at most 1024 characters."),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
        "response_format.json_schema.name is required.",
    ),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "response_format must be of type text, json_object, json_schema or structural_tag.",
    ),
    (
        {"response_format": {"type": "structural_tag"}},
        "response_format.format",
        "A structural_tag needs 'format', or both 'structures' and 'triggers'.",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "You can only use one kind of structured outputs constraint "
        "but multiple are specified: response_format and structured_outputs",
    ),
    (
        {"structured_outputs": {"choice": ["a"], "regex": "a"}},
        "structured_outputs",
        "You can only use one kind of structured outputs constraint but multiple are specified: choice, regex",
    ),
]

COMPLETION_REFUSED = [
    ({"prompt": None}, "prompt", "prompt is required."),
    ({"prompt": ""}, "prompt", "prompt must not be empty."),
    ({"prompt": []}, "prompt", "prompt must not be empty."),
    ({"prompt": [[]]}, "prompt.0", "prompt.0 must not be empty."),
    ({"prompt": [1, -2]}, "prompt.1", "prompt must not contain negative values"),
    ({"prompt": [[1], [2, -2]]}, "prompt.1.1", "prompt must not contain negative values"),
    ({"prompt": ["a", 1]}, "prompt.1", "prompt.1 must be a string."),
    (
        {"prompt": 7},
        "prompt",
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists.",
    ),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens must be at least 0, got -1."),
    ({"suffix": "end"}, "suffix", "`suffix` is not supported."),
    ({"best_of": 2}, "best_of", "`best_of` must equal `n`=1, got 2."),
    ({"logprobs": -2}, "logprobs", "logprobs must be non-negative or -1, got -2."),
    (
        {"logprob_token_ids": [1]},
        "logprob_token_ids",
        "when using `logprob_token_ids`, `logprobs` must be set.",
    ),
    (
        {"logprob_token_ids": [1], "logprobs": 1, "echo": True, "max_tokens": 0},
        "logprob_token_ids",
        "`logprob_token_ids` is not supported when `echo=True` and `max_tokens=0` "
        "because no output tokens are generated.",
    ),
]


def _refusal(model: type[ChatCompletionRequest | CompletionRequest], body: dict[str, object]) -> tuple[str | None, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    error = bad_request(caught.value)
    return error.param, error.message


@pytest.mark.parametrize(("sent", "param", "message"), CHAT_REFUSED, ids=lambda case: str(case)[:60])
def test_a_chat_request_that_cannot_be_served_is_refused_by_field(
    sent: dict[str, object], param: str, message: str
) -> None:
    messages = {} if sent == {} else {"messages": [USER]}
    assert _refusal(ChatCompletionRequest, messages | sent) == (param, message)


@pytest.mark.parametrize(("sent", "param", "message"), COMPLETION_REFUSED, ids=lambda case: str(case)[:60])
def test_a_completion_request_that_cannot_be_served_is_refused_by_field(
    sent: dict[str, object], param: str, message: str
) -> None:
    assert _refusal(CompletionRequest, {"prompt": "a"} | sent) == (param, message)


@pytest.mark.parametrize(("sent", "param", "message"), SHARED_REFUSED, ids=lambda case: str(case)[:60])
def test_both_requests_share_their_rules(sent: dict[str, object], param: str, message: str) -> None:
    assert _refusal(ChatCompletionRequest, {"messages": [USER]} | sent) == (param, message)
    assert _refusal(CompletionRequest, {"prompt": "a"} | sent) == (param, message)


def test_messages_are_kept_as_they_were_sent() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this?", "cache_control": {"type": "ephemeral"}},
                {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}, "uuid": "7"},
                {"image_url": "data:,"},
                "and this?",
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "ok", "name": "look"},
        {"role": "narrator", "mood": "calm"},
    ]
    request = ChatCompletionRequest.model_validate_json(json.dumps({"messages": messages}))
    assert request.messages == messages


def test_tools_without_a_choice_mean_auto_and_do_not_count_as_sent() -> None:
    request = ChatCompletionRequest.model_validate({"messages": [USER], "tools": [TOOL]})
    assert request.tool_choice == "auto"
    assert request.model_dump(exclude_unset=True) == {"messages": [USER], "tools": [TOOL]}


def test_a_continued_message_has_no_generation_prompt() -> None:
    sent = {"messages": [USER, {"role": "assistant", "content": "I"}], "continue_final_message": True}
    request = ChatCompletionRequest.model_validate(sent)
    assert request.add_generation_prompt is False
    assert request.model_dump(exclude_unset=True) == sent


@pytest.mark.parametrize(
    ("sent", "params"),
    [
        ({}, {}),
        ({"temperature": None, "stop": None, "n": None}, {}),
        ({"temperature": 0.5, "top_k": 4, "stop": "x"}, {"temperature": 0.5, "top_k": 4, "stop": ["x"]}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": True, "logprob_token_ids": [3]}, {"logprob_token_ids": [3]}),
        ({"logit_bias": {"3": 400}}, {"logit_bias": {"3": 100.0}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            {"structured_outputs": {"json": {"type": "object"}}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structured_outputs": {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"vllm_xargs": {"a": 1}}, {"extra_args": {"a": 1}}),
        ({"user": "me", "priority": 3, "stream": True}, {}),
    ],
)
def test_sampling_params_of_a_chat_hold_only_what_the_client_set(
    sent: dict[str, object], params: dict[str, object]
) -> None:
    request = ChatCompletionRequest.model_validate({"messages": [USER]} | sent)
    assert request.to_sampling_params(None) == params
    SamplingParams.model_validate(params)


@pytest.mark.parametrize(
    ("sent", "params"),
    [
        ({}, {}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": 2, "echo": True}, {"logprobs": 2, "prompt_logprobs": 2}),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 1}, {"logprobs": 2, "prompt_logprobs": 1}),
        ({"max_tokens": 0, "echo": True}, {"max_tokens": 1}),
        ({"n": 2, "best_of": 2}, {"n": 2}),
    ],
)
def test_sampling_params_of_a_completion_hold_only_what_the_client_set(
    sent: dict[str, object], params: dict[str, object]
) -> None:
    request = CompletionRequest.model_validate({"prompt": "a"} | sent)
    assert request.to_sampling_params(None) == params
    SamplingParams.model_validate(params)


def test_a_default_limit_is_used_only_where_the_client_gave_none() -> None:
    without = ChatCompletionRequest.model_validate({"messages": [USER]})
    with_limit = ChatCompletionRequest.model_validate({"messages": [USER], "max_tokens": 3})
    assert without.to_sampling_params(9) == {"max_tokens": 9}
    assert with_limit.to_sampling_params(9) == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_a_prompt_in_any_form_is_a_list_of_prompts(prompt: object, prompts: list[object]) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompts() == prompts


@pytest.mark.parametrize(
    "sent",
    [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"function": {"name": "look"}}},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [USER], "response_format": {"type": "json_object"}},
    ],
)
def test_a_full_dump_of_a_request_is_the_same_request(sent: dict[str, object]) -> None:
    request = ChatCompletionRequest.model_validate(sent)
    assert ChatCompletionRequest.model_validate_json(request.model_dump_json()) == request


def test_unknown_fields_of_a_request_survive() -> None:
    sent = {"messages": [USER | {"x": 1}], "tools": [TOOL | {"x": 1}], "of_next_year": {"a": [None]}}
    request = ChatCompletionRequest.model_validate_json(json.dumps(sent))
    assert json.loads(request.model_dump_json(exclude_unset=True)) == sent


def test_tools_dump_as_the_template_of_the_reference_sees_them() -> None:
    request = ChatCompletionRequest.model_validate({"messages": [USER], "tools": [TOOL]})
    assert request.tools is not None
    assert request.tools[0].model_dump() == {
        "type": "function",
        "function": {"name": "look", "description": None, "parameters": {"type": "object"}},
    }


def test_deferred_loading_of_a_tool_reaches_its_function() -> None:
    request = ChatCompletionRequest.model_validate({"messages": [USER], "tools": [TOOL | {"defer_loading": True}]})
    assert request.tools is not None
    assert request.tools[0].function.defer_loading is True
