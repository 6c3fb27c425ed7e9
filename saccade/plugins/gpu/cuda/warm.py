"""Launches every kernel once before the first request, so that no request waits for a compilation.

Chooses a few batch shapes that cover all kernel variants. All of their rows are padding, which
writes to the dummy page and attends to no key. There is no list of kernels. Instead,
`tests/runtime/test_warm.py` compares the variants compiled with those that requests launch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from saccade.runtime.batch import ROW_TOKENS, Frame
from saccade.runtime.batch_invariance import doubled
from saccade.runtime.start import Start

BLANK = -1
"""An adapter index that is never assigned to an adapter."""


@torch.inference_mode()
def prepare(start: Start) -> tuple[bool, str]:
    """Launch every kernel once, compiling several at a time. Implements `runtime.start.Prepare`.

    All ranks must call this together. Returns False, because batch invariance is not measured on
    GPUs.
    """
    launch = partial(_launch_all, start)
    if compile_abreast := start.net.ops.compiler(start.like.device, start.ranks):
        compile_abreast(launch)
    launch()
    return False, ""


def _launch_all(start: Start) -> None:
    net, attention, batcher, like = start.net, start.attention, start.batcher, start.like
    # Matmul kernels depend on the number of rows, whether these decode or prefill.
    frames = [Frame.decode(rows) for rows in doubled(1, batcher.slots)]
    for tokens in doubled(ROW_TOKENS, batcher.chunk_tokens):
        frames.append(Frame.mixed(0, tokens)._replace(splices=min(tokens, ROW_TOKENS)))
    if net.spec.kv_spec().whole_images:  # text-only prompts use different kernels
        frames.append(Frame.mixed(0, ROW_TOKENS)._replace(splices=0))
    for frame in frames:
        shown = like.new_zeros((frame.splices, like.shape[1]))
        batch = replace(batcher.idle(frame), embeddings=shown)
        attention.plan(batch)
        states = net.forward(batch, attention)
    net.logits(states[:1])
    with net.adapters.blank(BLANK, like):
        batch = replace(batcher.idle(Frame.decode(1)), adapters=((BLANK, slice(0, 1)),))
        attention.plan(batch)
        net.forward(batch, attention)
        start.encoder.warm_up(BLANK)
    if start.sampler is not None:
        start.sampler.warm_up()
    start.encoder.warm_up()
