"""The form of an answer: the tools that it may call, and the grammar that holds it.

Knows nothing of the text of grammars (`text/`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llguidance import LLTokenizer

from saccade.core.errors import InvalidRequest
from saccade.core.types import MAX_BIAS
from saccade.front.compiler import Compiler, MakeConstraint
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import GenerationRequest
from saccade.text.answer.answer_format import AnswerFormat
from saccade.text.answer.reasoning import Tags
from saccade.text.grammar.grammars import OutputConstraint
from saccade.text.grammar.tool_choice import read_tool_choice
from saccade.text.prompt.template import Tokenizer


class FormAnswer:
    """For requests with tools, or with a form that answers must have. tags: reasoning's."""

    def __init__(
        self, answer_format: AnswerFormat, compiler: Compiler, tokenizer: Tokenizer, tags: Tags
    ) -> None:
        self._format = answer_format
        self._compiler = compiler
        calls = answer_format.calls
        self._call_tag = None if calls is None else tokenizer.backend.token_to_id(calls.opens)
        self._tags = tags

    async def choose(self, preparation: Preparation) -> None:
        """Choose what holds the answer. Raises InvalidRequest if the model cannot call tools."""
        request = preparation.request
        preparation.constraint = self._constraint(request)
        if (tools := request.chat.tools) is None:
            return
        if tools.tools and not tools.open and self._format.calls is not None:
            preparation.request = replace(request, sampling=self._without_calls(request))
        preparation.reading = replace(
            preparation.reading,
            form=self._format.calls if tools.open else None,
            tools=tools.schemas,
            single=not tools.parallel,
        )

    async def compile(self, preparation: Preparation) -> None:
        """Compile the grammar for what was chosen."""
        request, constraint = preparation.request, preparation.constraint
        if constraint is None:
            return
        until = self._tags.close if preparation.encoded.reasoning == "open" else None
        share = preparation.client.share(request.cache_salt)
        grammar = await self._compiler.compile(constraint, until, share)
        if grammar is not None:
            preparation.grammar = grammar.text
            certain = preparation.reading.form is not None
            preparation.reading = replace(preparation.reading, certain=certain)

    def _constraint(self, request: GenerationRequest) -> OutputConstraint | MakeConstraint | None:
        tools, form, constraint = request.chat.tools, self._format.calls, request.constraint
        if tools is None:
            return constraint
        if form is None:
            if tools.open or (tools.held and tools.tools):
                raise InvalidRequest(
                    "tools: this model's chat template shows no way to call them: leave tools out, "
                    'send tool_choice "none", or have the server started with --tool-parser and '
                    "--chat-template",
                    "tools",
                    "unsupported_parameter",
                )
            if tools.held:
                raise InvalidRequest("tool_choice: there are no tools", "tool_choice")
            return constraint
        if not tools.held and not (tools.open and constraint is not None):
            return constraint

        def make(lexicon: LLTokenizer) -> OutputConstraint | None:
            answer = constraint(lexicon) if callable(constraint) else constraint
            calls = form.grammar(lexicon)
            return read_tool_choice(tools.choice, tools.tools, calls, tools.parallel, answer)

        return make

    def _without_calls(self, request: GenerationRequest) -> dict[str, object]:
        """Return the request's sampling with calls forbidden. The tools stay in the prompt, so that
        the cached beginning serves in both cases.
        """
        tag = self._call_tag
        if tag is None:
            return {**request.sampling}
        bias: Iterable[tuple[int, float]] = request.sampling.get("logit_bias", ())
        others = (each for each in bias if each[0] != tag)
        return {**request.sampling, "logit_bias": (*others, (tag, -MAX_BIAS))}
