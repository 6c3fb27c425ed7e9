"""The formats in which a model writes tool calls and reasoning. The operator sets them, or they are
detected in the chat template.

The tool-call formats are Qwen-VL's, in `formats/`, and those of plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from saccade.core.errors import ConfigError
from saccade.core.options import ReasoningParser
from saccade.plugins import import_field
from saccade.text.answer import formats
from saccade.text.answer.reasoning import THINK, Tags
from saccade.text.answer.tool_format import ToolFormat


def find_formats() -> dict[str, ToolFormat]:
    """Return all tool-call formats by name, in the order in which a template is searched for
    them.
    """
    others = import_field(lambda plugin: plugin.requests.tool_formats)
    found: Iterable[ToolFormat] = chain(formats.FORMATS, *others)
    return {each.name: each for each in sorted(found, key=lambda each: each.order)}


FORMATS: Mapping[str, ToolFormat] = find_formats()
CALL_TAGS = frozenset[str]().union(*(each.tags for each in FORMATS.values()))
"""Tags of tool calls in any format. They are kept in the text to parse even if they are special
tokens.
"""
THOUGHTS = (THINK, *(each.thoughts for each in FORMATS.values() if each.thoughts is not None))
"""The tags around reasoning in all formats."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats in which a model writes tool calls and reasoning."""

    calls: ToolFormat | None = None  # the tool-call format, or `None` if unknown
    reasoning: Tags | None = None  # the tags around reasoning, or `None` if unknown

    def described(self) -> tuple[tuple[str, str], ...]:
        """Return the two formats as (name, value) pairs, for the start-up report."""
        calls = "none: tools are refused"
        if self.calls is not None:
            calls = f"{self.calls.name} ({self.calls.note})" if self.calls.note else self.calls.name
        return (
            ("tool calls", calls),
            ("reasoning", f"within {self.reasoning.open}" if self.reasoning else "none"),
        )


SILENT = AnswerFormat()
"""The format of a model that calls no tools and does not reason, as far as is known."""


def find_answer_format(
    templates: Iterable[str], tool_parser: str, reasoning_parser: ReasoningParser
) -> AnswerFormat:
    """Return the formats of tool calls and of reasoning. A format is detected in the templates if
    its parser is "auto".

    templates: the checkpoint's templates, and the family's template for tools.

    Raises ConfigError for an unknown parser.
    """
    text = "\n".join(templates)
    if tool_parser in FORMATS:
        calls: ToolFormat | None = FORMATS[tool_parser]
    elif tool_parser == "auto":
        shown = (each for each in FORMATS.values() if any(mark in text for mark in each.marks))
        calls = next(shown, None)
    elif tool_parser == "none":
        calls = None
    else:
        names = ", ".join(FORMATS)
        raise ConfigError(f"--tool-parser {tool_parser}: expected auto, none or one of {names}")
    if reasoning_parser == "auto":
        tags = next((each for each in THOUGHTS if each.close in text), None)
    else:
        tags = next((each for each in THOUGHTS if each.name == reasoning_parser), None)
    return AnswerFormat(calls, tags)
