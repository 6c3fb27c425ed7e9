"""Implements `--parity generate`. After the front end has started, it answers a few chats, whose
first tokens must equal the tokens of transformers' own `generate`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from saccade.core.errors import CheckpointError, RequestError
from saccade.core.options import ServeOptions
from saccade.core.settings import CheckpointSettings
from saccade.core.types import Size
from saccade.families.registry import resolve_checkpoint
from saccade.front.content import message_from_object
from saccade.front.conversation import Chat
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.request_manager import RequestManager
from saccade.plugins.any_model.parity import (
    NEW_TOKENS,
    SIZES,
    SLACK,
    TEXTS,
    ReferenceChild,
    ReferenceQuestion,
    checkered,
    compare,
)
from saccade.plugins.any_model.spec import AnySpec

GREEDY = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}


async def check_parity(front: RequestManager, model: str, options: ServeOptions) -> None:
    """Answer a few chats, and compare the tokens with transformers' own. Raises CheckpointError if
    one differs.
    """
    spec, folder = (
        front.intake.spec,
        resolve_checkpoint(model, options.model.revision, options.of(CheckpointSettings).mmproj),
    )
    dtype = spec.dtype if options.model.dtype == "auto" else options.model.dtype
    if dtype not in SLACK:
        raise CheckpointError(f"--parity generate: set --dtype; the checkpoint has {dtype}")
    sizes: tuple[Size | None, ...] = (None,) * len(TEXTS)
    processor = spec.processor if isinstance(spec, AnySpec) and spec.sees_images else None
    if processor:
        sizes = (*sizes, *SIZES)
    far = spec.facts.text.near if isinstance(spec, AnySpec) and spec.long else None
    reference = ReferenceChild(folder, dtype, processor, far)
    try:
        for place, size in enumerate(sizes):
            text = TEXTS[place % len(TEXTS)]
            shown = "" if size is None else f" about an image of {size[1]} x {size[0]} px"
            try:
                asked, ours = await _answer(front, text, size)
            except RequestError as error:
                raise CheckpointError(
                    f"--parity generate: {text!r}{shown} failed: {error.message}"
                ) from error
            question = ReferenceQuestion(tuple(asked.request.tokens), size, NEW_TOKENS)
            expected = await asyncio.to_thread(reference.ask, question)
            compare(ours, expected, dtype, f"{text!r}{shown}")
    finally:
        reference.close()


async def _answer(
    front: RequestManager, text: str, size: Size | None
) -> tuple[PreparedRequest, list[int]]:
    content: list[Any] = [text] if size is None else [checkered(size), text]
    message = message_from_object({"role": "user", "content": content}, "messages[0]")
    prepared = await front.prepare(GenerationRequest(Chat((message,)), GREEDY))
    tokens: list[int] = []
    async with aclosing(front.generate(prepared)) as events:
        async for event in events:
            tokens += [each.token for each in event.logprobs]
    return prepared, tokens
