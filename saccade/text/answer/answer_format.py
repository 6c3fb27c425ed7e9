"""A model's way to write tool calls and reasoning: given by the operator, or found in the template.

Owns the formats that there are: those of `formats/`, and of plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pkgutil import resolve_name

from saccade.core.errors import ConfigError
from saccade.core.options import ReasoningParser
from saccade.plugins import plugins
from saccade.text.answer import formats
from saccade.text.answer.reasoning import THINK, Tags
from saccade.text.answer.tool_format import ToolFormat


def find_formats() -> dict[str, ToolFormat]:
    """Return the formats by name, in the order in which a template is asked for them."""
    names = [plugin.tool_formats for plugin in plugins() if plugin.tool_formats]
    found: Iterable[ToolFormat] = chain(formats.FORMATS, *map(resolve_name, names))
    return {each.name: each for each in sorted(found, key=lambda each: each.order)}


FORMATS: Mapping[str, ToolFormat] = find_formats()
CALL_TAGS = frozenset[str]().union(*(each.tags for each in FORMATS.values()))
"""Tags that are read where calls are, special tokens or not."""
THOUGHTS = (THINK, *(each.thoughts for each in FORMATS.values() if each.thoughts is not None))
"""All tags of reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes tool calls and reasoning."""

    calls: ToolFormat | None = None  # the format for calls, or `None` if unknown
    # the tags around reasoning before an answer, or `None` if unknown
    reasoning: Tags | None = None

    def described(self) -> tuple[tuple[str, str], ...]:
        """Return (name, value) pairs for people to read."""
        calls = "none: tools are refused"
        if self.calls is not None:
            calls = f"{self.calls.name} ({self.calls.note})" if self.calls.note else self.calls.name
        return (
            ("tool calls", calls),
            ("reasoning", f"within {self.reasoning.open}" if self.reasoning else "none"),
        )


SILENT = AnswerFormat()
"""A model that is not known to do either."""


def find_answer_format(
    templates: Iterable[str], tool_parser: str, reasoning_parser: ReasoningParser
) -> AnswerFormat:
    """Return the format that `templates` show, for each parser that is "auto".

    `templates` are the checkpoint's and ours for tools. Raises ConfigError for an unknown parser.
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
