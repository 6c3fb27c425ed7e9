"""The step that compiles the grammar of a request's answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from saccade.front.prepared import Preparation
from saccade.front.step_order import StepContext
from saccade.front.steps.form_answer import find_calls
from saccade.plugins.grammar.compiler import Compiler

if TYPE_CHECKING:
    from saccade.plugins.grammar.compiler import MakeConstraint
    from saccade.text.answer.tool_format import ToolFormat
    from saccade.text.grammar.call_grammar import Lexicon
    from saccade.text.grammar.constraint import OutputConstraint
    from saccade.text.grammar.tools import ToolSet


class HoldAnswer:
    """Compiles the grammar for an answer with a required format or with possible tool calls."""

    def __init__(self, context: StepContext) -> None:
        spec = context.spec
        self._calls = context.answer_format.calls
        self._tags = context.tags
        self._compiler = Compiler(context.tokenizer, spec.vocab_size, spec.eos_token_ids)

    async def compile(self, preparation: Preparation) -> None:
        """Compile the grammar of the request's answer. Raises InvalidRequest with the location of
        an error.
        """
        request = preparation.request
        until = self._tags.close if preparation.encoded.reasoning == "open" else None
        share = preparation.client.share(request.cache_salt)
        form = find_calls(preparation, self._calls)
        constraint = _constraint(request.constraint, request.chat.tools, form)
        grammar = await self._compiler.compile(constraint, until, share)
        if grammar is not None:
            preparation.grammar = grammar.text
            certain = preparation.reading.form is not None
            preparation.reading = replace(preparation.reading, certain=certain)


def _constraint(
    answer: OutputConstraint | None, tools: ToolSet | None, form: ToolFormat | None
) -> OutputConstraint | MakeConstraint:
    if answer is not None and (tools is None or form is None or not (tools.held or tools.open)):
        return answer
    assert tools is not None and form is not None, "checked by `FormAnswer`"

    def make(lexicon: Lexicon) -> OutputConstraint | None:
        from saccade.plugins.grammar.tool_choice import read_tool_choice

        calls = form.syntax.grammar(lexicon)
        return read_tool_choice(tools.choice, tools.tools, calls, tools.parallel, answer)

    return make
