"""Tests batch invariance before the first request: whether a row's results are bit-identical
whatever other rows are in the batch.

The entire network computes representative steps. All of their rows are padding: they write to the
dummy KV page and attend to no keys.
"""

from __future__ import annotations

from itertools import chain

import torch

from saccade.core.config import EngineConfig
from saccade.core.plan import Open, Plan, Row
from saccade.core.types import SamplingParams
from saccade.nn.protocol import Attention, Batch, FamilyNet
from saccade.runtime.batch import Batcher, Frame
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.start import TRIAL_TOKENS

MANY_ROWS = 64
"""With this many rows, the same kernels are used as for a prompt."""
PRIME = 997
"""The difference between the token ids of neighboring test rows, so that all rows are different."""


@torch.inference_mode()
def rows_are_batch_invariant(
    net: FamilyNet,
    attention: Attention,
    batcher: Batcher,
    embeddings: EmbeddingMemory,
    config: EngineConfig,
) -> bool:
    """Return True if a row's results are bit-identical alone and in larger batches.

    Padding rows are computed by the entire network in batches of up to the number of slots, and in
    one batch as large as a prompt. (If prompts used other kernels than small batches, the number of
    draft tokens in a step would change the results of a prompt in the same step.)

    For a model with states, the tokens of one sequence are also computed one by one and in a single
    step, in slot 0 and on free KV pages. A delta rule that is computed in chunks depends on how the
    prompt is split into steps. This is not tested: the function returns False for such a model.

    All ranks must run all tests, even after a failure, because all-reduces may depend on the batch
    too.
    """
    batch_invariant, before = True, torch.empty(0)
    many = min(max(MANY_ROWS, 2 * batcher.slots), batcher.chunk_tokens + batcher.slots)
    words = torch.arange(many) * PRIME % net.spec.vocab_size
    for rows in (*doubled(1, batcher.slots), many):
        batch = batcher.idle(Frame.decode(rows))
        batch.tokens.copy_(words[:rows])
        found = _row_bits(net, attention, batch)
        batch_invariant &= not len(before) or torch.equal(before, found[: len(before)])
        before = found
    if not net.spec.kv_spec().state_bytes(config.dtype):
        return batch_invariant
    count = min(TRIAL_TOKENS, config.max_running, (config.kv_pages - 1) * config.page_size)
    pages = tuple(range(1, 1 + -(-count // config.page_size)))
    trial = [Row(0, place, 1, (), sample=True) for place in range(count)]
    bits: list[torch.Tensor] = []
    for steps in ([[row] for row in trial], [trial]):
        batcher.open(Open(0, tuple(range(count)), 1, (), (), SamplingParams(), pages))
        batches = (batcher.build(Plan(0, rows=tuple(step)), embeddings)[0] for step in steps)
        bits.append(torch.cat([_row_bits(net, attention, batch) for batch in batches]))
        batcher.close(0)
    return batch_invariant and torch.equal(*bits) and not _scans_in_chunks(net)


def _scans_in_chunks(net: FamilyNet) -> bool:
    caches = chain.from_iterable(net.spec.kv_spec().layers)
    return not net.ops.sequential_states and any(cache.name == "recurrent" for cache in caches)


def _row_bits(net: FamilyNet, attention: Attention, batch: Batch) -> torch.Tensor:
    """Return the hidden states and logits of a batch, concatenated to [T, hidden + V]."""
    attention.plan(batch)
    states = net.forward(batch, attention)
    return torch.cat((states, net.logits(states)), dim=1)


def doubled(least: int, most: int) -> list[int]:
    """Return `least`, `2 * least`, `4 * least` and so on up to `most`, which is always included."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], most]
