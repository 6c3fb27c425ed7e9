"""Describes the render endpoints in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Components, Description, reference
from saccade.api.operations import EXAMPLE_CHAT
from saccade.plugins.render.handlers import RenderedPrompt


def _complete(components: Components) -> None:
    components["RenderedPrompts"] = {"type": "array", "items": reference("RenderedPrompt")}


OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/chat/completions/render",
            "Tokens and image hashes of a chat's prompt, as vLLM returns them to routers",
            "ChatCompletionRequest",
            "RenderedPrompt",
            {"messages": EXAMPLE_CHAT},
        ),
        ApiOperation(
            "post",
            "/v1/completions/render",
            "Tokens of the prompts of a completion",
            "CompletionRequest",
            "RenderedPrompts",
            {"prompt": "The square is"},
        ),
        ApiOperation(
            "post",
            "/v1/messages/render",
            "Tokens and image hashes of a message's prompt",
            "MessagesRequest",
            "RenderedPrompt",
            {
                "model": "",
                "max_tokens": 32,
                "messages": [{"role": "user", "content": "The square is"}],
            },
            error="MessageError",
        ),
    ),
    types=(RenderedPrompt,),
    complete=_complete,
)
