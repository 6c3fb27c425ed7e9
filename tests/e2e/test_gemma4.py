"""Gemma 4 over HTTP: calls and thoughts in its own spelling, whose tags are special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from saccade_bench.fixtures.server import serving

pytestmark = pytest.mark.more
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"enum": ["near", "far"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "box": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0},
                "maxItems": 2},
    },
    "required": ["where", "count"],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": LOOK}}


@pytest.fixture(scope="module")
def client(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    options = ("--dtype", "float32", "--served-model-name", "tiny")
    with serving(checkpoint("gemma4"), tmp_path_factory.mktemp("logs"), *options) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_a_call_comes_and_its_result_goes_back(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    chat: list[Any] = [{"role": "user", "content": "how many red circles are there?"}]
    settings = {"model": "tiny", "tools": [TOOL], "temperature": 0, "max_tokens": 200}
    answer = create(messages=chat, tool_choice="required", parallel_tool_calls=False, **settings)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), LOOK)
    stream = create(
        messages=chat, tool_choice="required", parallel_tool_calls=False, stream=True, **settings
    )
    deltas = [each for part in stream for each in part.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "look"
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    chat.append(choice.message.model_dump(exclude_none=True))
    chat.append({"role": "tool", "tool_call_id": call.id, "content": "three"})
    after = create(messages=chat, **settings).usage
    assert after.prompt_tokens > answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_thoughts_are_asked_for_and_read_apart(
    client: openai.OpenAI, checkpoint: Callable[..., Path]
) -> None:
    """A grammar has the random model think; both tags are special tokens."""
    create: Any = client.chat.completions.create
    chat: list[Any] = [{"role": "user", "content": "how many?"}]
    settings = {"model": "tiny", "temperature": 0, "max_tokens": 40}
    plain = create(messages=chat, **settings).usage
    tokenizer = Tokenizer.from_file(str(checkpoint("gemma4") / "tokenizer.json"))
    begin, end = (f"<[{tokenizer.token_to_id(tag)}]>" for tag in ("<|channel>", "<channel|>"))
    lark = f'start: {begin} "thought\\nI see four.\\n" {end} "Four."'
    body = {"structured_outputs": {"grammar": lark}}
    asked = create(messages=chat, reasoning_effort="high", extra_body=body, **settings)
    assert asked.usage.prompt_tokens > plain.prompt_tokens  # <|think|>, in a turn of its own
    message = asked.choices[0].message
    assert (message.reasoning_content, message.content) == ("I see four.", "Four.")
