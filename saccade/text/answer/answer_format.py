"""A model's way to write tool calls and reasoning: given by the operator, or found in the template.

Owns the marks by which a template shows either. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from saccade.text import call_gemma, call_glm, call_xml
from saccade.text.answer import tool_calls
from saccade.text.answer.reasoning import CHANNEL, THINK, Tags
from saccade.text.answer.tool_calls import Form

ToolParser = Literal["auto", "hermes", "xml", "glm", "mistral", "llama3", "gemma", "none"]
ReasoningParser = Literal["auto", "think", "channel", "none"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """calls: in which form; None: the model is not known to write calls. reasoning: the tags of
    what stands before an answer; None: the model is not known to reason.
    """

    calls: Form | None = None
    reasoning: Tags | None = None

    def described(self) -> tuple[tuple[str, str], ...]:
        """For people: (name, value)."""
        calls = "hermes (JSON)" if self.calls == "hermes" else self.calls
        return (
            ("tool calls", calls or "none: tools are refused"),
            ("reasoning", f"within {self.reasoning.open}" if self.reasoning else "none"),
        )


_MARKS: Mapping[str, Form] = {
    call_xml.FUNCTION: "xml",
    call_glm.KEY: "glm",
    call_gemma.OPEN: "gemma",
    tool_calls.OPEN: "hermes",
    tool_calls.MISTRAL: "mistral",
    '"parameters": dictionary of argument name': "llama3",
}
"""The form of a template's calls by the first of these that it has."""
_TAGS: Mapping[ReasoningParser, Tags] = {"think": THINK, "channel": CHANNEL}
SILENT = AnswerFormat()
"""A model that is not known to do either."""


def find_manner(
    templates: Iterable[str], tool_parser: ToolParser, reasoning_parser: ReasoningParser
) -> AnswerFormat:
    """The format that `templates` (the checkpoint's, and ours for tools) show for each parser that
    is "auto".
    """
    text = "\n".join(templates)
    calls: Form | None = None
    if tool_parser == "auto":
        calls = next((form for mark, form in _MARKS.items() if mark in text), None)
    elif tool_parser != "none":
        calls = tool_parser
    tags = _TAGS.get(reasoning_parser)
    if reasoning_parser == "auto":
        tags = next((each for each in _TAGS.values() if each.close in text), None)
    return AnswerFormat(calls, tags)
