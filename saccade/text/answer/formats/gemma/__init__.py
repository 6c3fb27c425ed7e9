"""Calls as Gemma 4 writes them (`call.py`), its values in a grammar (`rules.py`), and the tags of
its reasoning.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLTokenizer

from saccade.core.grammar_vocab import tag_term
from saccade.text.answer.formats.gemma.call import CLOSE, OPEN, QUOTE, GemmaCall
from saccade.text.answer.formats.gemma.rules import GemmaRules
from saccade.text.answer.reasoning import Tags
from saccade.text.answer.tool_format import ToolFormat
from saccade.text.grammar.call_grammar import TaggedCalls, ValueParts
from saccade.text.grammar.grammars import quoted
from saccade.text.grammar.tools import Tool

CHANNEL = Tags("<|channel>", "<channel|>", "thought", name="channel")


class GemmaGrammar(TaggedCalls):
    """Grammar for calls that follow each other directly."""

    def __init__(self, lexicon: LLTokenizer) -> None:
        super().__init__(lexicon, OPEN, CLOSE)
        self._quote = tag_term(lexicon, QUOTE)

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        made = GemmaRules(f"g_{index}", schema, tool.param, self._quote)
        call = f"tool_{index}: {quoted(f'call:{tool.name}')} {made.object(schema)}"
        for part in made.parts:
            parts.add(part)
        return [call, *made.rules]


FORMAT = ToolFormat(
    "gemma",
    marks=(OPEN,),
    order=30,
    opens=OPEN,
    tags=frozenset({OPEN, CLOSE, QUOTE}),
    reader=lambda _: GemmaCall(),
    grammar=GemmaGrammar,
    thoughts=CHANNEL,
)
