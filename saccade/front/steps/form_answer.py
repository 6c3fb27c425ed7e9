"""The step that chooses how tool calls are parsed. It rejects tools and structured output that this
model or server does not support.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from saccade.core.errors import InvalidRequest
from saccade.core.types import forbid_token
from saccade.front.extras import find_extra
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.step_order import StepContext
from saccade.text.answer.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """The format in which the answer contains tool calls, if it is not the model's own."""

    NAME: ClassVar[str] = "form.calls"
    form: ToolFormat


def find_calls(preparation: Preparation, model: ToolFormat | None) -> ToolFormat | None:
    """Return the format in which the answer contains tool calls. model: the model's own format."""
    written = find_extra(preparation.extras, WrittenCalls)
    return model if written is None else written.form


class FormAnswer:
    """Prepares requests with tools or structured output."""

    def __init__(self, context: StepContext) -> None:
        self._calls = context.answer_format.calls
        self._backend = context.tokenizer.backend
        self._can_hold = context.can_hold

    async def choose(self, preparation: Preparation) -> None:
        """Choose how tool calls are parsed.

        Raises InvalidRequest if the model cannot call tools, or if a grammar is needed and no
        plugin provides grammars.
        """
        request, form = preparation.request, find_calls(preparation, self._calls)
        if form is None:
            _check_without_calls(request)
        if request.held and not self._can_hold:
            raise _without_grammars(request)
        if (tools := request.chat.tools) is None:
            return
        if tools.tools and not tools.open and form is not None:
            preparation.request = replace(request, sampling=self._without_calls(request, form))
        preparation.reading = replace(
            preparation.reading,
            form=form if tools.open else None,
            tools=tools.schemas,
            single=not tools.parallel,
        )

    def _without_calls(self, request: GenerationRequest, form: ToolFormat) -> dict[str, object]:
        """Return the request's sampling fields, changed so that the model cannot call tools.

        The tools stay in the prompt, so that the cached prefix is the same whether calls are
        allowed or not.
        """
        tag = self._backend.token_to_id(form.opens)
        if tag is None:
            return {**request.sampling}
        return forbid_token(request.sampling, tag)


def _check_without_calls(request: GenerationRequest) -> None:
    """Raise InvalidRequest if the request allows tool calls, for a model without a format for
    them.
    """
    tools = request.chat.tools
    if tools is None:
        return
    if tools.open or (tools.held and tools.tools):
        raise InvalidRequest(
            "tools: this model's chat template does not support tools: omit tools, send "
            'tool_choice "none", or ask the operator to start the server with --tool-parser and '
            "--chat-template",
            "tools",
            "unsupported_parameter",
        )
    if tools.held:
        raise InvalidRequest(
            "tool_choice requires tools: send tools, or omit tool_choice", "tool_choice"
        )


def _without_grammars(request: GenerationRequest) -> InvalidRequest:
    tools = request.chat.tools
    if request.constraint is not None:
        param = request.constraint.param
    elif tools is not None and tools.choice in (None, "auto"):
        param = next(f"{tool.place}.strict" for tool in tools.tools if tool.strict)
    else:
        param = "tool_choice"
    return InvalidRequest(
        f"{param}: structured output is not installed on this server: omit it, and describe the "
        "format in the prompt",
        param,
        "unsupported_parameter",
    )
