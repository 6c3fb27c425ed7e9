"""Whether a row's bits depend on the rows beside it, measured through a whole network before the
first request.

Owns the choice of representative steps. Their rows are padding: written to the dummy
page, without keys.
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
"""So many are multiplied as a prompt's are."""
PRIME = 997
"""From one word that rows are measured with to the next, so that no two rows are alike."""


@torch.inference_mode()
def rows_are_batch_invariant(
    net: FamilyNet,
    attention: Attention,
    batcher: Batcher,
    embeddings: EmbeddingMemory,
    config: EngineConfig,
) -> bool:
    """Return True if a row has the same bits alone and next to other rows.

    Measures this with rows of padding, through the whole network: up to the number of slots, and as
    many rows as a prompt has. (Where prompts' products differ from those with few rows, one draft
    token more or less in a step would change a prompt that is computed in it.) For a model with
    states, compares also one sequence's tokens, whose rows resume from each other: in slot 0, on
    pages that are free. A delta rule that is computed in chunks depends on where a prompt was cut:
    this is not measured. Every rank takes part to the end whatever is found, since sums over ranks
    may depend on their rows, too.
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
    """Compute a batch's states and logits, side by side."""
    attention.plan(batch)
    states = net.forward(batch, attention)
    return torch.cat((states, net.logits(states)), dim=1)


def doubled(least: int, most: int) -> list[int]:
    """Return `least`, twice as many, and so on, then `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], most]
