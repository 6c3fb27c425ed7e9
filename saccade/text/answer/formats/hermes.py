"""Tool calls in JSON, as Qwen2.5, Qwen3-VL and others write them:

<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>
"""

from __future__ import annotations

from typing import Any

from saccade.text.answer.json_call import JsonCall
from saccade.text.answer.tool_format import CLOSE, OPEN, CallSyntax
from saccade.text.grammar.call_grammar import TaggedCalls, ValueParts, arguments_of, json_call
from saccade.text.grammar.tools import Tool


class HermesGrammar(TaggedCalls):
    """Builds the grammar of calls in JSON, each on separate lines."""

    def tool_rules(self, index: int, tool: Tool, schema: Any, parts: ValueParts) -> list[str]:
        call = json_call(tool.name, arguments_of(index, schema, parts), end="}\n")
        return [f"tool_{index}: {call}"]


SYNTAX = CallSyntax(
    reader=lambda _: JsonCall(CLOSE),
    grammar=lambda lexicon: HermesGrammar(lexicon, OPEN, CLOSE, gap="\n", between="\n"),
)
