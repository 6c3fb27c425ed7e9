"""Requests in which a token's name, or a number that float32 does not hold, stands where a form of
the answer is asked for: for fuzzing.

Owns the bodies; the same seed draws the same. Knows nothing of what the server should answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

NAMES = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
NUMBERS = (
    0.0,
    -0.0,
    1.0,
    2.0,
    1e-6,
    1e-7,
    1e-37,
    1e-38,
    1e-39,
    1e-40,
    1e-44,
    1e-46,
    1e-320,
    5e-324,
)
"""Around the least that float32 and float64 hold."""
CHAT = "/v1/chat/completions"
Body = dict[str, Any]


def _texts(choose: random.Random) -> str:
    name = choose.choice(NAMES)
    return choose.choice(
        (name, name, f"a{name}", f"{name}b", name * 2, f"{name} {choose.choice(NAMES)}", name[:-1])
    )


def _schema(choose: random.Random) -> Body:
    text, said = _texts(choose), _texts(choose)
    return choose.choice(
        (
            {"enum": [text]},
            {"enum": [text, said]},
            {"const": text},
            {"type": "string", "pattern": f"^{re.escape(text)}$"},
            {"type": "object", "properties": {text: {"const": said}}, "required": [text]},
            {"type": "array", "items": {"const": text}, "minItems": 1, "maxItems": 2},
        )
    )


def _object(choose: random.Random) -> Body:
    """As tools have it."""
    text = _texts(choose)
    inner = choose.choice(({"type": "integer"}, {"enum": [_texts(choose)]}))
    return {
        "type": "object",
        "properties": {text: inner},
        "required": [text],
        "additionalProperties": False,
    }


def _named(choose: random.Random) -> Body:
    return {"name": "f", "schema": _schema(choose), "strict": True}


def _tool(choose: random.Random) -> Body:
    return {"name": "f", "parameters": _object(choose), "strict": True}


def _lark(choose: random.Random) -> str:
    text = _texts(choose).replace("/", "\\/")
    return choose.choice(
        (f'start: "{text}"', f"start: <[{choose.randrange(12)}]>", f'start: "{text}"+')
    )


def _short(choose: random.Random, regex: bool = False) -> str:
    return re.escape(_texts(choose)) if regex else _texts(choose)


FORMS: tuple[tuple[str, Callable[[random.Random], Body]], ...] = (
    ("*", lambda c: {"guided_choice": [_short(c)]}),
    ("*", lambda c: {"guided_choice": ["a", _short(c)]}),
    ("*", lambda c: {"guided_regex": _short(c, regex=True)}),
    ("*", lambda c: {"guided_grammar": _lark(c)}),
    ("*", lambda c: {"guided_json": _schema(c)}),
    ("*", lambda c: {"structured_outputs": {"choice": [_short(c)]}}),
    ("*", lambda c: {"structured_outputs": {"regex": _short(c, regex=True)}}),
    ("*", lambda c: {"structured_outputs": {"grammar": _lark(c)}}),
    (
        "*",
        lambda c: {"response_format": {"type": "json_schema", "json_schema": _named(c)}},
    ),
    (
        CHAT,
        lambda c: {
            "tools": [{"type": "function", "function": _tool(c)}],
            "tool_choice": c.choice(
                ("required", "auto", {"type": "function", "function": {"name": "f"}})
            ),
        },
    ),
    (
        "/v1/responses",
        lambda c: {"text": {"format": {"type": "json_schema", **_named(c)}}},
    ),
    (
        "/v1/responses",
        lambda c: {"tools": [{"type": "function", **_tool(c)}], "tool_choice": "required"},
    ),
    (
        "/v1/messages",
        lambda c: {"output_config": {"format": {"type": "json_schema", "schema": _schema(c)}}},
    ),
    (
        "/v1/messages",
        lambda c: {
            "tools": [{"name": "f", "input_schema": _object(c), "strict": True}],
            "tool_choice": {"type": "any"},
        },
    ),
)


def bodies(seed: int, count: int) -> Iterator[tuple[str, Body]]:
    """(route, body); each form comes as often as the others."""
    choose = random.Random(seed)
    says = [{"role": "user", "content": "hi"}]
    asks: dict[str, Body] = {
        CHAT: {"messages": says, "max_tokens": 24},
        "/v1/completions": {"prompt": "hi", "max_tokens": 24},
        "/v1/responses": {"input": "hi", "max_output_tokens": 24},
        "/v1/messages": {"messages": says, "max_tokens": 24},
    }
    for number in range(count):
        route, form = FORMS[number % len(FORMS)]
        if route == "*":
            route = choose.choice((CHAT, "/v1/completions"))
        body = {"model": "demo", **asks[route], **form(choose)}
        for field in ("temperature", "top_p"):
            if choose.random() < 0.5:
                body[field] = choose.choice(NUMBERS)
        if route in (CHAT, "/v1/completions"):
            for field in ("min_p", "presence_penalty", "frequency_penalty"):
                if choose.random() < 0.15:
                    body[field] = choose.choice(NUMBERS)
            if choose.random() < 0.2:
                body["logprobs"] = True if route == CHAT else 2
            if choose.random() < 0.2:
                body["min_tokens"] = choose.randrange(1, 20)
            if choose.random() < 0.2:
                body["n"] = 2
            if choose.random() < 0.15:
                body["prompt_logprobs"] = choose.randrange(3)
            if choose.random() < 0.15:
                body["logit_bias"] = {str(choose.randrange(12)): choose.choice((-100, 100))}
        yield route, body
