from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import saccade.demo
from saccade.core.errors import ConfigError
from saccade.core.options import ReasoningParser
from saccade.families.qwen_vl.spec import TEMPLATES
from saccade.plugins.tool_formats.formats import CHANNEL
from saccade.text.answer.answer_format import FORMATS, AnswerFormat, find_answer_format
from saccade.text.answer.reasoning import THINK
from saccade.text.grammar.json_size import Extent, extent
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from tests.fixtures.families.gemma3 import CHAT_TEMPLATE as GEMMA3
from tests.fixtures.families.gemma4 import CHAT_TEMPLATE as GEMMA4
from tests.text.templates import GLM, LLAMA, MISTRAL, QWEN2_VL, QWEN3_VL, STRICT, THINKING

DEMO = Path(saccade.demo.__file__).parent / "model"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def loaded(source: str, tmp_path: Path) -> ChatTemplate:
    (tmp_path / "t.jinja").write_text(source)
    return ChatTemplate.load(DEMO, Tokenizer.load(DEMO), tmp_path / "t.jinja", TEMPLATES)


@pytest.mark.parametrize(
    ("source", "answer_format"),
    [
        (QWEN2_VL, AnswerFormat(FORMATS["hermes"])),  # has none of its own and gets ours
        (QWEN3_VL, AnswerFormat(FORMATS["hermes"])),
        (THINKING, AnswerFormat(FORMATS["xml"], THINK)),
        (GLM, AnswerFormat(FORMATS["glm"], THINK)),
        (MISTRAL, AnswerFormat(FORMATS["mistral"])),
        (LLAMA, AnswerFormat(FORMATS["llama3"])),
        (GEMMA3, AnswerFormat()),
        (GEMMA4, AnswerFormat(FORMATS["gemma"], CHANNEL)),
        (STRICT, AnswerFormat()),
        ("{{ tools }}<|im_start|><|vision_start|>", AnswerFormat()),
    ],
)
def test_a_template_shows_how_its_model_writes(
    source: str, answer_format: AnswerFormat, tmp_path: Path
) -> None:
    assert find_answer_format(loaded(source, tmp_path).sources, "auto", "auto") == answer_format


@pytest.mark.parametrize(
    ("tools", "reasoning", "answer_format"),
    [
        ("xml", "none", AnswerFormat(FORMATS["xml"])),
        ("none", "think", AnswerFormat(None, THINK)),
        ("hermes", "auto", AnswerFormat(FORMATS["hermes"], THINK)),
        ("gemma", "channel", AnswerFormat(FORMATS["gemma"], CHANNEL)),
    ],
)
def test_the_operator_knows_better(
    tools: str, reasoning: ReasoningParser, answer_format: AnswerFormat
) -> None:
    assert find_answer_format([THINKING], tools, reasoning) == answer_format
    assert all(value for _, value in answer_format.described())


def test_a_parser_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--tool-parser hermse: expected auto, none or .*hermes"):
        find_answer_format([THINKING], "hermse", "auto")


def test_a_template_without_tools_gets_ours_for_tools_and_calls_alone(tmp_path: Path) -> None:
    template = loaded(QWEN2_VL.replace("You are a", "You are MY"), tmp_path)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    assert "MY" in template.render(messages)
    assert "<tools>" in template.render(messages, [TOOL])
    messages += [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "x"},
    ]
    assert "<tool_response>\nx" in template.render(messages)
    own = loaded(QWEN3_VL, tmp_path)
    assert own.sources == (QWEN3_VL,)


def test_an_extent_counts_whatever_the_nesting() -> None:
    assert extent({"ab": ["c", 1, None, {"d": "ef"}]}) == Extent(14, 3)
    assert extent("abc") == Extent(3, 0)
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    assert extent(deep) == Extent(10_001, 5_000)
