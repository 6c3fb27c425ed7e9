"""A model's way to write tool calls and reasoning: given by the operator, or found in the template.

Owns the marks by which a template shows either. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from saccade.text import call_xml, reasoning, tool_calls
from saccade.text.tool_calls import Form

ToolParser = Literal["auto", "hermes", "xml", "none"]
ReasoningParser = Literal["auto", "think", "none"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """calls: in which form; None: the model is not known to write calls. reasons: within <think>
    and </think> before an answer.
    """

    calls: Form | None = None
    reasons: bool = False

    def described(self) -> tuple[tuple[str, str], ...]:
        """For people: (name, value)."""
        calls = {None: "none: tools are refused", "hermes": "hermes (JSON)", "xml": "xml"}
        return (
            ("tool calls", calls[self.calls]),
            ("reasoning", "within <think>" if self.reasons else "none"),
        )


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
        if tool_calls.OPEN in text:
            calls = "xml" if call_xml.FUNCTION in text else "hermes"
    elif tool_parser != "none":
        calls = tool_parser
    thinks = reasoning.CLOSE in text if reasoning_parser == "auto" else reasoning_parser == "think"
    return AnswerFormat(calls, thinks)
