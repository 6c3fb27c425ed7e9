"""Launch every kernel that a request could meet once before the first request, so that no request
waits for a compiler.

Owns the choice of steps that stands for all steps. Their rows are padding: written to the dummy
page, seeing nothing. Knows no kernels: `tests/runtime/test_warm.py` compares compiled variants with
requests' launches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from saccade.core.config import EngineConfig
from saccade.core.plan import Open, Plan, Row
from saccade.core.types import SamplingParams
from saccade.kernels.reference.ops import Ops
from saccade.nn.protocol import Attention, Batch, FamilyNet
from saccade.runtime.batch import ROW_TOKENS, Batcher, Frame
from saccade.runtime.cuda.graphs import Prepare
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.sampling.sampler import Sampler
from saccade.runtime.vision.packed_encoder import PackedEncoder

BLANK = -1
"""An adapter's number that no adapter is given."""
MANY_ROWS = 64
"""So many are multiplied as a prompt's are."""
PRIME = 997
"""From one word that rows are measured with to the next, so that no two rows are alike."""
TRIAL_TOKENS = 8


@torch.inference_mode()
def compile_few(
    net: FamilyNet,
    attention: Attention,
    batcher: Batcher,
    encoder: PackedEncoder,
    *,
    records: bool = False,
) -> None:
    """Run one row of padding through the network, draw a token, and encode two small images. Every
    rank takes part.

    records: rows that decode will be recorded.

    That is enough on CPUs, which compile the same code for any number of rows.
    """
    batch = batcher.idle(Frame.decode(1))
    attention.plan(batch)
    net.forward(batch, attention)
    if records:
        net.ops.record(lambda: (net.forward(batch, attention),))
    net.ops.draw_few(torch.zeros(net.spec.vocab_size), SamplingParams(temperature=1.0), 0.5)
    encoder.warm_up()


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
    states, compares also one sequence's tokens, whose rows go on from each other: in slot 0, on
    pages that are free. A delta rule that is computed in chunks depends on where a prompt was cut:
    this is not measured. Every rank takes part to the end whatever is found, since sums over ranks
    may depend on their rows, too.
    """
    batch_invariant, before = True, torch.empty(0)
    many = min(max(MANY_ROWS, 2 * batcher.slots), batcher.chunk_tokens + batcher.slots)
    words = torch.arange(many) * PRIME % net.spec.vocab_size
    for rows in (*_doubled(1, batcher.slots), many):
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


@torch.inference_mode()
def warm_up(
    net: FamilyNet,
    attention: Attention,
    batcher: Batcher,
    encoder: PackedEncoder,
    sampler: Sampler | None,
    like: torch.Tensor,
    ranks: int = 1,
) -> None:
    """Launch every kernel once, compiled several at a time.

    Every rank takes part. The sampler is one rank's. `like`: as embeddings.
    """
    launch = partial(_launch_all, net, attention, batcher, encoder, sampler, like)
    if prepare := compiler(net.ops, like.device, ranks):
        prepare(launch)
    launch()


def compiler(ops: Ops, device: torch.device, ranks: int) -> Prepare | None:
    """Return what compiles all kernels of some work, several at a time.

    Returns `None` where nothing is compiled at first launch. ranks: those on this machine, which
    compile at the same time.
    """
    if ops.compiles != "everything":
        return None
    # Imported where there is a GPU: elsewhere Triton need not be installed.
    from saccade.kernels.triton.compilation import compile_abreast

    return partial(compile_abreast, device=device, ranks=ranks)


def _launch_all(
    net: FamilyNet,
    attention: Attention,
    batcher: Batcher,
    encoder: PackedEncoder,
    sampler: Sampler | None,
    like: torch.Tensor,
) -> None:
    # Products are others for few rows and for many, whether these decode or are of prompts.
    frames = [Frame.decode(rows) for rows in _doubled(1, batcher.slots)]
    for tokens in _doubled(ROW_TOKENS, batcher.chunk_tokens):
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
        encoder.warm_up(BLANK)
    if sampler is not None:
        sampler.warm_up()
    encoder.warm_up()


def _doubled(least: int, most: int) -> list[int]:
    """Return `least`, twice as many, and so on, then `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], most]
