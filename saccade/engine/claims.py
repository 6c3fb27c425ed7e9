"""Device memory for computation beside weights and pages, so that start-up can reserve it. Tests
compare these figures with tensors' own sizes.
"""

from __future__ import annotations

from saccade.core.config import (
    MIB,
    SCORE_BLOCK_BYTES,
    Dtype,
    EncoderConfig,
    StepGraphSizes,
)
from saccade.core.family import FamilySpec
from saccade.core.options import CacheOptions

GRAPH_POOL_BYTES = 256 * MIB
GRAPH_BYTES = 4 * MIB
"""What all graphs of the language model take together, and what each does besides. Estimates: no
graph was ever measured.
"""
TOKEN_WIDTHS = 24
PATCH_WIDTHS = 36
"""What is alive at a time while the language model computes a token, and the tower a patch, in
hidden sizes of either: a bound on what tests measure on tensors without memory, of models from 4B
to 30B (20 to 22, and 16 to 34).
"""
RUNS_BESIDE = 2
"""Graphs keep what they compute in, and PyTorch what the run before a capture did."""


def cuda_bytes(
    spec: FamilySpec,
    chunk_tokens: int,
    graphs: StepGraphSizes,
    encode_patches: int,
    encoder: EncoderConfig,
    dtype: Dtype,
) -> int:
    """Bytes that a GPU needs at a time: the language model's graphs and a chunk, the tower's graphs
    and a pack.
    """
    language = step_graph_bytes(graphs, spec, dtype) + chunk_bytes(spec, chunk_tokens, dtype)
    return language + tower_bytes(spec, encode_patches, encoder, dtype)


def step_graph_bytes(sizes: StepGraphSizes, spec: FamilySpec, dtype: Dtype) -> int:
    """Device memory that the language model's graphs take."""
    if not sizes.count:
        return 0
    inputs = sizes.most_tokens * embedding_bytes_per_token(spec, dtype)
    computed = RUNS_BESIDE * chunk_bytes(spec, sizes.most_tokens, dtype)
    return GRAPH_POOL_BYTES + sizes.count * GRAPH_BYTES + inputs + computed


def chunk_bytes(spec: FamilySpec, tokens: int, dtype: Dtype) -> int:
    """Transient device memory for the computation of so many tokens, in bytes."""
    return tokens * TOKEN_WIDTHS * spec.hidden_size * itemsize(dtype)


def tower_bytes(spec: FamilySpec, patches: int, encoder: EncoderConfig, dtype: Dtype) -> int:
    """Transient device memory of the vision tower, in bytes: a pack of so many patches without a
    graph, and its graphs.
    """
    if not spec.sees_images:
        return 0
    each = PATCH_WIDTHS * spec.cuts.encoder_width * itemsize(dtype)
    return each * (patches + RUNS_BESIDE * max(encoder.graph_sizes, default=0))


def least_embedding_bytes(
    caches: CacheOptions, spec: FamilySpec, dtype: Dtype, free_bytes: int
) -> int:
    """Bytes that pages leave to embeddings by default: the largest image, or less if memory is
    short.
    """
    if not spec.sees_images or caches.embedding_cache_device_mb is not None:
        return 0
    largest = spec.largest_image.tokens * embedding_bytes_per_token(spec, dtype)
    return min(largest, free_bytes // 16)


def embedding_bytes_per_token(spec: FamilySpec, dtype: Dtype) -> int:
    """Bytes of one token's embedding, deepstack levels included."""
    return spec.embedding_width * itemsize(dtype)


def itemsize(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 2


def scoring_bytes(spec: FamilySpec, chunk_tokens: int) -> int:
    """Transient memory of the largest block of scored prompt rows, in bytes: logits from the head
    (and, of several ranks, gathered), in float32, their exponentials, and the comparison.
    """
    rows = min(chunk_tokens, max(1, SCORE_BLOCK_BYTES // (4 * spec.vocab_size)))
    return rows * spec.vocab_size * (4 + 4 + 4 + 4 + 1)
