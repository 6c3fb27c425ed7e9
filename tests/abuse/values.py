"""Hostile values in every place of JSON bodies, one at a time.

Owns the bodies, which are rich and right, and the values. Knows nothing of what the server should
answer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

DIGITS = "9" * 5000
DEEP = 900
"""Objects within each other: as many as JSON readers take, more than code that calls itself."""
VALUES = {
    "5,000 digits": DIGITS,
    "-5,000 digits": f"-{DIGITS}",
    "4,301 digits": "1" * 4301,
    "400 digits": "7" * 400,
    "64 bits": str(2**64),
    "63 bits": str(2**63 - 1),
    "31 bits": str(2**31),
    "1e16": "1e16",
    "9e18": "9e18",
    "1e308": "1e308",
    "1e400": "1e400",
    "-1e400": "-1e400",
    "digits and a fraction": "1" * 400 + ".5",
    "1e99999999999": "1e99999999999",
    "1e-46": "1e-46",
    "1e-320": "1e-320",
    "-0.0": "-0.0",
    "3.5e38": "3.5e38",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "half a pair": '"\\ud800"',
    "half a pair as a key": '{"\\ud800": 1}',
    "NUL": '"\\u0000"',
    "20,000 lists": "[" * 20_000 + "]" * 20_000,
    "900 lists": "[" * DEEP + "]" * DEEP,
    "900 objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "digits within": f'{{"a": [{DIGITS}]}}',
    "1e400 within": '{"a": [1e400]}',
    "digits in a text": json.dumps(f'{{"a": {DIGITS}}}'),
    "1e400 in a text": json.dumps('{"a": 1e400}'),
    "NaN in a text": json.dumps('{"a": NaN}'),
    "900 objects in a text": json.dumps('{"a":' * DEEP + "1" + "}" * DEEP),
    "true": "true",
    "null": "null",
    "an object": "{}",
    "a list": "[]",
    "-1": "-1",
    "1.5": "1.5",
    "a text": '"x"',
}
"""JSON, or what looks like it, by name."""
NUMBERS = frozenset({"5,000 digits", "-5,000 digits", "4,301 digits", "1e400", "-1e400", "64 bits"})
"""Of these: numbers that no field takes."""

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 9},
        "b": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "a+"},
        "c": {"type": "array", "items": {"type": "number", "multipleOf": 2}, "minItems": 1},
        "e": {"enum": [1]},
        "k": {"const": 3},
    },
    "required": ["a"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHORT = {"model": "demo", "messages": HI, "max_tokens": 2}

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            **SHORT,
            "messages": [
                {"role": "system", "content": "s", "cache_control": {"ttl": "5m"}},
                {"role": "user", "name": "u", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "x", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "3"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.1,
            "n": 1,
            "seed": 3,
            "stop": ["zz"],
            "logit_bias": {"5": 1.0},
            "logprobs": True,
            "top_logprobs": 2,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [3],
            "min_tokens": 0,
            "user": "u",
            "metadata": {"a": "b"},
            "chat_template_kwargs": {"x": 1},
            "cache_salt": "s",
            "mm_processor_kwargs": {"min_pixels": 4096, "max_pixels": 65536},
        },
    ),
    (
        "/v1/chat/completions",
        {
            **SHORT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    ("/v1/chat/completions", {**SHORT, "structured_outputs": {"regex": "a+"}}),
    ("/v1/chat/completions", {**SHORT, "tools": [TOOL], "tool_choice": "required"}),
    (
        "/v1/completions",
        {"model": "demo", "prompt": "hi", "max_tokens": 2, "top_k": 4, "logprobs": 2, "echo": True},
    ),
    ("/v1/completions", {"model": "demo", "prompt": [1, 2], "max_tokens": 1}),
    (
        "/v1/responses",
        {
            "model": "demo",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "text": {"format": {"type": "text"}},
            "temperature": 0.5,
            "store": False,
        },
    ),
    (
        "/v1/messages",
        {
            **SHORT,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": {"c": [2]}}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": SCHEMA, "input_examples": [{"a": 1}]}],
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": HI}),
    ("/tokenize", {"model": "demo", "messages": HI, "tools": [TOOL]}),
    ("/detokenize", {"model": "demo", "tokens": [1, 2, 3]}),
)
"""Route and body."""
_HERE = "@HERE@"

Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Every place within a body, the whole first."""
    yield at
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from places(value[key], (*at, key))


def bent(body: Any, place: Place, value: str) -> bytes:
    """`body` as JSON, with `value` at a place."""
    whole = {"body": copy.deepcopy(body)}
    at: Any = whole
    path: Place = ("body", *place)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = _HERE
    return json.dumps(whole["body"]).replace(f'"{_HERE}"', value).encode()


def cases() -> Iterator[tuple[str, Place, str, bytes]]:
    """Route, place, name of the value, body: all there are, in a fixed order."""
    for route, body in BODIES:
        for place in places(body):
            for name, value in VALUES.items():
                yield route, place, name, bent(body, place, value)
