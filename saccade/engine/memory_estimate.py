"""Estimates the device memory that start-up reserves in addition to weights and KV pages.

Tests compare the estimates with the sizes of actual tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.config import (
    MIB,
    POSITION_CACHE_BYTES,
    SCORE_BLOCK_BYTES,
    Dtype,
    EncoderConfig,
    StepGraphSizes,
)
from saccade.core.family import FamilySpec
from saccade.core.options import CacheOptions, EngineOptions
from saccade.core.types import MAX_BIASED_TOKENS, MAX_STOP_TOKENS
from saccade.kernels.backend import find_backend

GRAPH_POOL_BYTES = 256 * MIB
GRAPH_BYTES = 4 * MIB
"""CUDA graphs of the language model: the size of their shared pool, and of each graph. These sizes
were not measured.
"""
LIBRARY_BYTES = 320 * MIB
"""cuBLAS workspaces, 32 MiB for each of five streams, and lazily loaded kernels. This size was not
measured.
"""
RULED_TOKENS = 1 << 21
"""Memory is reserved for this many tokens of requests that must not repeat n-grams."""
PEAK_ACTIVATIONS_PER_TOKEN = 24
"""Peak activation size per token, in multiples of hidden_size (tests measure 15 to 22 for models
from 4B to 30B).
"""
PEAK_ACTIVATIONS_PER_PATCH = 20
"""Peak activation size of the vision encoder per patch, in multiples of hidden_size (16 to 19)."""
GATED, BESIDE_GATED = 3, 8
"""Peak activation size per token in an MLP: three tensors of the MLP's width (the gate, the gated
values and their product), and eight of hidden_size. This exceeds `PEAK_ACTIVATIONS_PER_TOKEN` if
the MLP is wider than 5 x hidden_size (Gemma 4 E2B: 8).
"""
PATCHES_OF_TOKEN = 4
"""Minimum number of patches per image token."""
RUNS_BESIDE = 2
"""The activations of graphs count twice: once for the graphs' own memory pool, and once for the
warm-up run before a capture, whose memory PyTorch keeps.
"""
DECODE_SPLITS = 32
DECODE_SPLIT_TOKENS = 256
"""Maximum number of KV splits of a decoding request, and their minimum size in tokens, as the GPU
backend chooses them. Each split has a partial result in float32.
"""
SAMPLER_BYTES_PER_LOGIT = 14
"""Logits, log-probabilities and masks of requests that sample."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Maximum sizes of a language model step."""

    rows: int  # rows that decode or sample
    tokens: int  # prompt tokens
    context: int  # tokens of one sequence
    page_size: int  # tokens per KV page


def cuda_bytes(
    spec: FamilySpec,
    steps: StepBounds,
    graphs: StepGraphSizes,
    encode_patches: int,
    encoder: EncoderConfig,
    dtype: Dtype,
    options: EngineOptions,
) -> int:
    """Return the peak device bytes on a GPU, without weights, KV pages and the embedding cache.

    They include a step of the language model, an encoding, the graphs of both, and all permanent
    buffers.
    """
    return (
        step_graph_bytes(graphs, spec, dtype)
        + graph_decode_bytes(graphs, spec, steps)
        + step_bytes(spec, steps, dtype)
        + kept_bytes(spec, steps)
        + tower_bytes(spec, encode_patches, encoder, dtype)
        + LIBRARY_BYTES
        + workspace_bytes(options.attention_backend)
    )


def workspace_bytes(attention: str) -> int:
    """Return the workspace bytes of the library that implements this attention backend on GPUs."""
    backend = find_backend("cuda", installed=False)
    return 0 if backend is None else backend.workspaces.get(attention, 0)


def step_graph_bytes(sizes: StepGraphSizes, spec: FamilySpec, dtype: Dtype) -> int:
    """Return the device bytes for the language model's graphs, without the KV splits of
    decoding.
    """
    if not sizes.count:
        return 0
    buffers = graph_buffer_bytes(sizes, spec, dtype)
    computed = RUNS_BESIDE * chunk_bytes(spec, most_graph_tokens(sizes), dtype)
    return GRAPH_POOL_BYTES + sizes.count * GRAPH_BYTES + buffers + computed


def most_graph_tokens(sizes: StepGraphSizes) -> int:
    """Return the maximum number of tokens of a step in a graph."""
    return max((0, *sizes.rows, sizes.most_tokens))


def graph_buffer_bytes(sizes: StepGraphSizes, spec: FamilySpec, dtype: Dtype) -> int:
    """Return the size in bytes of the graphs' input and output buffers for embeddings and hidden
    states.
    """
    states = most_graph_tokens(sizes) * spec.hidden_size * itemsize(dtype)
    return max((0, *sizes.mixed_tokens)) * embedding_bytes_per_token(spec, dtype) + states


def graph_decode_bytes(sizes: StepGraphSizes, spec: FamilySpec, steps: StepBounds) -> int:
    """Return the bytes that graphs need for the KV splits of decoding (see `decode_bytes`)."""
    return RUNS_BESIDE * decode_bytes(spec, steps) if sizes.count else 0


def step_bytes(spec: FamilySpec, steps: StepBounds, dtype: Dtype) -> int:
    """Return the peak transient bytes of a step without a graph.

    Sampling reuses the memory of the layers, so the larger of the two counts.
    """
    images = steps.tokens * embedding_bytes_per_token(spec, dtype)
    layers = chunk_bytes(spec, steps.tokens, dtype) + images + decode_bytes(spec, steps)
    states = (steps.tokens + steps.rows) * spec.hidden_size * itemsize(dtype)
    return max(layers, states + images + drawing_bytes(spec, steps.rows))


def chunk_bytes(spec: FamilySpec, tokens: int, dtype: Dtype) -> int:
    """Return the transient device bytes for computing `tokens` tokens."""
    hidden, widest = spec.hidden_size, max(count for count, _ in spec.cuts.text)
    values = max(PEAK_ACTIVATIONS_PER_TOKEN * hidden, GATED * widest + BESIDE_GATED * hidden)
    return tokens * (values + spec.cuts.lasting) * itemsize(dtype)


def decode_bytes(spec: FamilySpec, steps: StepBounds) -> int:
    """Return the bytes for the partial results of decoding with split KV, in one layer.

    Each split has one float32 vector for each head, and its weight.
    """
    dims = [shape.dim for shape in spec.kv_spec().attention.values()]
    pieces = steps.rows * min(DECODE_SPLITS, -(-steps.context // DECODE_SPLIT_TOKENS))
    return pieces * spec.cuts.heads * (max(dims) + 1) * 4


def drawing_bytes(spec: FamilySpec, rows: int) -> int:
    """Return the transient bytes for sampling in `rows` rows, with log-probabilities and masks."""
    return rows * spec.vocab_size * SAMPLER_BYTES_PER_LOGIT


def kept_bytes(spec: FamilySpec, steps: StepBounds) -> int:
    """Return the bytes of permanent buffers other than graphs.

    These are tables with one row per slot, and cached image positions.
    """
    positions = POSITION_CACHE_BYTES if spec.sees_images else 0
    return edit_bytes(spec, steps.rows) + rule_bytes(spec, steps) + table_bytes(steps) + positions


def edit_bytes(spec: FamilySpec, slots: int) -> int:
    """Return the bytes of the buffers in `runtime/sampling/edits.py`.

    They store how often each token occurs in each slot, and the biased and stop tokens of each
    slot.
    """
    listed = MAX_BIASED_TOKENS + MAX_STOP_TOKENS + 16 + len(spec.eos_token_ids)
    return slots * (4 * spec.vocab_size + 8 * listed)


def rule_bytes(spec: FamilySpec, steps: StepBounds) -> int:
    """Return the bytes of the buffers in `plugins/token_rules/row_rules.py`.

    They store the tokens of each row and the length of each match, with twice the necessary size so
    that they can grow. They also store one row of logits for the end of reasoning. If more than
    `RULED_TOKENS` tokens have rules at the same time, the buffers use memory that the other
    estimates leave free.
    """
    tokens = min(steps.rows * steps.context, max(steps.context, RULED_TOKENS))
    return 16 * tokens + 4 * steps.rows * spec.vocab_size


def table_bytes(steps: StepBounds) -> int:
    """Return the bytes of the buffers in `runtime/batch.py`, which are the page tables of all slots
    and the indices of one step.
    """
    pages = steps.rows * (2 + steps.context // steps.page_size) * 4
    return pages + 64 * (steps.tokens + steps.rows) + MIB


def tower_bytes(spec: FamilySpec, patches: int, encoder: EncoderConfig, dtype: Dtype) -> int:
    """Return the transient device bytes of the vision encoder.

    They include an encoding of `patches` patches without a graph, and the encoder's graphs.
    """
    if not spec.sees_images:
        return 0
    each = PEAK_ACTIVATIONS_PER_PATCH * spec.cuts.encoder_width * itemsize(dtype)
    return each * (patches + RUNS_BESIDE * largest(encoder)) + tower_buffer_bytes(
        spec, encoder, dtype
    )


def tower_buffer_bytes(spec: FamilySpec, encoder: EncoderConfig, dtype: Dtype) -> int:
    """Return the bytes of the input and output buffers of the vision encoder's graphs.

    The buffers contain patches, their positions, and embeddings.
    """
    read = spec.cuts.encoder_width * itemsize(dtype) + 16
    written = embedding_bytes_per_token(spec, dtype) // PATCHES_OF_TOKEN
    return largest(encoder) * (read + written)


def largest(encoder: EncoderConfig) -> int:
    """Return the number of patches in the vision encoder's largest graph."""
    return max(encoder.graph_sizes, default=0)


def least_embedding_bytes(
    caches: CacheOptions, spec: FamilySpec, dtype: Dtype, free_bytes: int
) -> int:
    """Return the minimum size of the embedding cache in bytes if no option sets it.

    This is the size of the largest image, or less if memory is short. It is reserved before KV
    pages.
    """
    if not spec.sees_images or caches.embedding_cache_device_mb is not None:
        return 0
    largest = spec.largest_image.tokens * embedding_bytes_per_token(spec, dtype)
    return min(largest, free_bytes // 16)


def embedding_bytes_per_token(spec: FamilySpec, dtype: Dtype) -> int:
    """Return the size in bytes of one token's embedding, including deepstack levels."""
    return spec.embedding_width * itemsize(dtype)


def itemsize(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 2


def scoring_bytes(spec: FamilySpec, chunk_tokens: int) -> int:
    """Return the transient bytes for computing logprobs of one block of prompt tokens.

    They include the logits (also gathered, with several ranks), a float32 copy, their exponentials,
    and a comparison mask.
    """
    rows = min(chunk_tokens, max(1, SCORE_BLOCK_BYTES // (4 * spec.vocab_size)))
    return rows * spec.vocab_size * (4 + 4 + 4 + 4 + 1)
