"""Calls as the JSON formats write them."""

from __future__ import annotations

F = '{"name": "f", "arguments": {"a": [1, "}"]}}'
G = '{"name": "g", "arguments": {}}'
BOTH = [("f", '{"a": [1, "}"]}'), ("g", "{}")]
WRITTEN = {
    "hermes": f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
    "granite4": f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>",
    "ernie45": f"\n<tool_call>\n{F}\n</tool_call>\n\n<tool_call>\n{G}\n</tool_call>\n",
    "longcat": f"<longcat_tool_call>{F}</longcat_tool_call><longcat_tool_call>{G}</longcat_tool_call>",
    "internlm": f"<|action_start|><|plugin|>\n{F}<|action_end|>\n<|action_start|><|plugin|>\n{G}<|action_end|>\n",
    "granite": f"<|tool_call|> [{F}, {G}]",
    "granite-20b-fc": f"<function_call> {F}\n<function_call> {G}",
    "jamba": f"<tool_calls>[\n  {F},\n  {G}\n]</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>[{F}, {G}]</tool_calls>",
    "apertus": '<|tools_prefix|>[{"f": {"a": [1, "}"]}}, {"g": {}}]<|tools_suffix|>',
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{F}<|function_call|>{G}",
    "cohere_command3": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": [1, "}"]}},'
        ' {"tool_call_id": "1", "tool_name": "g", "parameters": {}}]<|END_ACTION|>'
    ),
    "inkling": (
        '<|content_invoke_tool_json|>{"name": "f", "args": {"a": [1, "}"]}}<|end_message|>'
        '<|content_invoke_tool_json|>{"name": "g", "args": {}}<|end_message|>'
    ),
    "mistral": '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": [1, "}"]}[TOOL_CALLS]g{}',
    "llama3_json": f"<|python_tag|>{F}; {G}",
    "phi4_mini_json": f"functools[{F}, {G}]",
    "xlam": f"[{F}, {G}]",
}
"""The same two calls, as each format writes them."""
