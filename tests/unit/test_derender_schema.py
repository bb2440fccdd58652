"""A parameter's text becomes JSON by the schema of its tool."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.derender.formats.schema import ANY, json_begun, json_of, kinds_of


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "9" * 100_000, "1e" * 50_000, "-" * 100_000])
def test_no_value_is_too_much_to_tell_its_type(text: str) -> None:
    for kinds in (ANY, frozenset({"integer", "number", "object", "array"})):
        assert json_of(text, kinds) == json.dumps(text)


OBJECT = {"type": "object"}
NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, ' a "b"\n', r'" a \"b\"\n"'),
        ({"type": "string"}, "", '""'),
        ({}, "5", '"5"'),
        ({"description": "what"}, "[1]", '"[1]"'),
        ({"type": "integer"}, "5", "5"),
        ({"type": "integer"}, " -5\n", "-5"),
        ({"type": "integer"}, "+5", "5"),
        ({"type": "integer"}, "007", "7"),
        ({"type": "integer"}, "123456789012345678901234567890", "123456789012345678901234567890"),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "integer"}, "", '""'),
        ({"type": "integer"}, "[1]", "[1]"),
        ({"type": "number"}, "-1.0", "-1.0"),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, ".5", "0.5"),
        ({"type": "number"}, "1e999", '"1e999"'),
        ({"type": "number"}, "inf", '"inf"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, " False ", "false"),
        ({"type": "boolean"}, "1", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "null"}, "NULL", "null"),
        ({"type": "null"}, "none", '"none"'),
        ({"type": "array"}, '["a", 1]', '["a", 1]'),
        ({"type": "array"}, ' [ "a",\n 1 ] ', '[ "a",\n 1 ]'),
        ({"type": "array"}, "a, b", '"a, b"'),
        ({"type": "array"}, "[1,", '"[1,"'),
        ({"type": "array"}, "[NaN]", '"[NaN]"'),
        ({"type": "array"}, "[1e999]", '"[1e999]"'),
        ({"type": "array"}, '["a\nb"]', r'["a\nb"]'),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        (OBJECT, '{"a": {"b": null}}', '{"a": {"b": null}}'),
        (OBJECT, '{"a": "1", "a": "2"}', '{"a": "1", "a": "2"}'),
        (OBJECT, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "nil", '"nil"'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5.5", '"5.5"'),
        ({"type": ["string", "object"]}, "5", '"5"'),
        ({"type": ["string", "object"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "array"]}, '{"a": 1}', r'"{\"a\": 1}"'),
        (NULLABLE, "5", "5"),
        (NULLABLE, "null", "null"),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "true", "true"),
        ({"allOf": [{"type": "integer"}], "description": "what"}, "5", "5"),
        ({"anyOf": [{"anyOf": [NULLABLE]}]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {}]}, "x", '"x"'),
        ({"anyOf": [True, {"type": "integer"}]}, "x", '"x"'),
        ({"enum": ["a", "b"]}, "a", '"a"'),
        ({"enum": [1, 2, None]}, "2", "2"),
        ({"enum": [1, 2, None]}, "null", "null"),
        ({"enum": [True]}, "true", "true"),
        ({"enum": [1.5]}, "1.5", "1.5"),
        ({"const": 5}, "5", "5"),
        ({"type": "string", "enum": ["5"]}, "5", '"5"'),
        ({"properties": {"a": {}}}, '{"a": 1}', '{"a": 1}'),
        ({"items": {"type": "string"}}, '["a"]', '["a"]'),
        ({"type": "any"}, "5", "5"),
        ({"type": "any"}, "five", '"five"'),
        ({"type": "int"}, "5", "5"),
        ({"type": " Float"}, "5", "5"),
        ({"type": "dict"}, "{}", "{}"),
        ({"type": ["str", 7]}, "5", '"5"'),
        ({"type": 7}, "5", '"5"'),
        ({"anyOf": "wrong"}, "5", '"5"'),
        ({"$ref": "#/$defs/Number"}, "5", "5"),
        ({"$ref": "#/$defs/Number", "description": "what"}, "5", "5"),
        ({"$ref": "#/$defs/a~1b"}, "true", "true"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/$defs/Nowhere"}, "5", '"5"'),
        ({"$ref": "http://elsewhere/Number"}, "5", '"5"'),
        ({"$ref": 7}, "5", '"5"'),
    ],
)
def test_text_becomes_the_type_that_its_schema_names(schema: dict[str, Any], text: str, value: str) -> None:
    defs = {
        "Number": {"type": "number"},
        "a/b": {"type": "boolean"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, NULLABLE]},
    }
    assert json_of(text, kinds_of(schema, {"$defs": defs})) == value


TYPES = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    str: {"string"},
}


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        st.lists,
    )
)
def test_a_value_written_as_json_comes_back_where_no_string_may_be(value: object) -> None:
    assert json.loads(json_of(json.dumps(value), ANY)) == value


@given(
    text=st.text(),
    kinds=st.frozensets(st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])),
)
def test_any_text_becomes_json_under_any_schema(text: str, kinds: frozenset[str]) -> None:
    value = json.loads(json_of(text, kinds))
    assert value == text or "string" not in kinds or kinds & TYPES[type(value)]
    assert json_begun(text, kinds) in (text.strip(), json.dumps(text, ensure_ascii=False)[:-1])


def test_a_schema_that_refers_to_itself_many_times_is_followed_once() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 50}
    assert kinds_of(loop, {"$defs": {"Loop": {"anyOf": [loop] * 50}}}) == ANY
