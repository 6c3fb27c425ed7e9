from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import saccade.families.qwen_vl
import saccade.plugins.models.internvl
from saccade.families.registry import load_spec
from saccade.text.answer.answer_format import FORMATS, AnswerFormat, find_answer_format
from saccade.text.answer.reader import AnswerReader, gather
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from saccade_bench.lab import tiles
from tests.text.templates import QWEN2_VL

OURS = (Path(saccade.families.qwen_vl.__file__).parent / "tools.jinja").read_text()
TILED = (Path(saccade.plugins.models.internvl.__file__).parent / "tools.jinja").read_text()
IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "Was ist <das>?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Sieh näher hin",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}


def render(messages: list[dict[str, Any]], template: str = OURS, **options: Any) -> str:
    return ChatTemplate({"default": template}, {"eos_token": "<|im_end|>"}).render(
        messages, **options
    )


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": [IMAGE, TEXT]}],
        [{"role": "system", "content": [TEXT]}, {"role": "user", "content": [TEXT, IMAGE, IMAGE]}],
        [
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": " x \n"}]},
            {"role": "assistant", "content": "\nWell\n"},
            {"role": "system", "content": "late"},
            {"role": "user", "content": []},
        ],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"add_vision_id": True}])
def test_without_tools_it_is_the_checkpoints_own_template(
    messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "variables": variables,
    }
    assert render(messages, **options) == render(messages, QWEN2_VL, **options)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": [IMAGE, TEXT]}],
        [{"role": "user", "content": [TEXT, IMAGE, IMAGE]}, {"role": "assistant", "content": "x"}],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_of_tiles_too(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    own, ours = (
        render(messages, template, add_generation_prompt=add_generation_prompt)
        for template in (tiles.CHAT_TEMPLATE, TILED)
    )
    assert ours == own


def test_tools_and_images_of_tiles_stand_where_their_model_learnt_it() -> None:
    call = {"function": {"name": "look", "arguments": {"where": "left"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [IMAGE, TEXT]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [IMAGE]},
    ]
    text = render(messages, TILED, tools=[TOOL])
    assert text.startswith("<|im_start|>system\n# Tools\n\n")
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<IMG_CONTEXT>\nWas ist <das>?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n<IMG_CONTEXT>\n\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    ours, qwens = (
        render([{"role": "system", "content": "Be short."}, *messages], template, tools=[TOOL])
        for template in (TILED, OURS)
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert ours.replace("<IMG_CONTEXT>\n", image) == qwens


def test_a_checkpoint_of_tiles_calls_as_hermes_does(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("internvl")
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer, None, load_spec(folder).templates)
    assert find_answer_format(template.sources, "auto", "auto") == AnswerFormat(FORMATS["hermes"])
    chat = [{"role": "user", "content": "Hi"}]
    assert "<tools>" in template.render(chat, tools=[TOOL])
    assert "<tools>" not in template.render(chat)


def test_tools_stand_in_the_system_message() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [IMAGE]},
    ]
    text = render(messages, tools=[TOOL])
    signature = json.dumps(TOOL, ensure_ascii=False)
    assert text == (
        "<|im_start|>system\nBe short.\n\n# Tools\n\nYou may call one or more functions to assist "
        "with the user query.\n\nYou are provided with function signatures within <tools></tools> "
        f"XML tags:\n<tools>\n{signature}\n</tools>\n\nFor each function call, return a json "
        "object with function name and arguments within <tool_call></tool_call> XML "
        "tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    default = render(messages[1:], tools=[TOOL])
    assert default.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools")


def test_calls_and_their_answers_with_pictures_are_rendered() -> None:
    calls = [
        {"type": "function", "function": {"name": "look", "arguments": {"where": "<ä>"}}},
        {"type": "function", "function": {"name": "look", "arguments": '{"where": 1'}},
    ]
    text = render(
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "content": [TEXT, IMAGE]},
            {"role": "tool", "content": "nothing"},
            {"role": "assistant", "content": None, "tool_calls": calls[:1]},
            {"role": "tool", "content": "done"},
        ],
        tools=[TOOL],
    )
    assert text.partition("?<|im_end|>\n")[2] == (
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "look", "arguments": '
        '{"where": "<ä>"}}\n</tool_call>\n<tool_call>\n{"name": "look", "arguments": {"where": 1}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nWas ist <das>?<|vision_start|><|image_pad|>"
        "<|vision_end|>\n</tool_response>\n<tool_response>\nnothing\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"where": "<ä>"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\ndone\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_was_read_is_rendered_as_it_was_written() -> None:
    """So that the next turn finds the keys and values of this one."""
    written = (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"where": "é", "n": [1, 2.5]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    )
    reader = AnswerReader(None, FORMATS["hermes"], {})
    answer = gather(reader.feed(written) + reader.end())
    calls = [
        {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in answer.calls
    ]
    message = {"role": "assistant", "content": answer.text, "tool_calls": calls}
    text = render([{"role": "user", "content": "?"}, message], tools=[TOOL])
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n" in text
