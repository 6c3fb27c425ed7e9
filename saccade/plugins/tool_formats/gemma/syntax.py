"""The parser (`call.py`) and the grammar of Gemma 4's tool calls. `rules.py` builds the rules for
values.
"""

from __future__ import annotations

from typing import Any

from saccade.plugins.tool_formats.formats import CALL_CLOSE, CALL_OPEN, QUOTE
from saccade.plugins.tool_formats.gemma.call import GemmaCall
from saccade.plugins.tool_formats.gemma.rules import GemmaRules
from saccade.text.answer.tool_format import CallSyntax
from saccade.text.grammar.call_grammar import Lexicon, TaggedCalls, ValueParts, tag_term
from saccade.text.grammar.parts import quoted
from saccade.text.grammar.tools import Tool


class GemmaGrammar(TaggedCalls):
    """The grammar of calls, between which no text is allowed."""

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__(lexicon, CALL_OPEN, CALL_CLOSE)
        self._quote = tag_term(lexicon, QUOTE)

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        made = GemmaRules(f"g_{index}", schema, tool.param, self._quote)
        call = f"tool_{index}: {quoted(f'call:{tool.name}')} {made.object(schema)}"
        for part in made.parts:
            parts.add(part)
        return [call, *made.rules]


SYNTAX = CallSyntax(reader=lambda _: GemmaCall(), grammar=GemmaGrammar)
