"""Launch every kernel that a request could meet once before the first request, so that no request
waits for a compiler.

Owns the choice of steps that stands for all steps. Their rows are padding: written to the dummy
page, seeing nothing. Knows no kernels: `tests/runtime/test_warm.py` compares compiled variants with
requests' launches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from saccade.runtime.batch import ROW_TOKENS, Frame
from saccade.runtime.batch_invariance import doubled
from saccade.runtime.start import Start

BLANK = -1
"""An adapter's number that no adapter is given."""


@torch.inference_mode()
def prepare(start: Start) -> tuple[bool, str]:
    """Implement `runtime.start.Prepare`: launch every kernel once, compiled several at a time.

    Every rank takes part. Whether rows are exact is not measured.
    """
    launch = partial(_launch_all, start)
    if compile_abreast := start.net.ops.compiler(start.like.device, start.ranks):
        compile_abreast(launch)
    launch()
    return False, ""


def _launch_all(start: Start) -> None:
    net, attention, batcher, like = start.net, start.attention, start.batcher, start.like
    # Products are others for few rows and for many, whether these decode or are of prompts.
    frames = [Frame.decode(rows) for rows in doubled(1, batcher.slots)]
    for tokens in doubled(ROW_TOKENS, batcher.chunk_tokens):
        frames.append(Frame.mixed(0, tokens)._replace(splices=min(tokens, ROW_TOKENS)))
    if net.spec.kv_spec().whole_images:  # prompts without images have kernels of their own
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
