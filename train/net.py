"""A fast forward pass of Qwen3-VL for training, with the library's parameters.

It supports rectangular batches of still images, and must agree with the library's own forward pass,
which `tests/demo` and `train` check.

It is fast for three reasons. All images of a call have one size, so attention is two plain matrix
products. The duplicated frame of a still image is folded into the patch weights. Positions are
computed once per grid.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Model = Any
"""transformers' Qwen3VLForConditionalGeneration, whose modules are not typed well enough to check.
"""


@lru_cache(maxsize=1024)
def _merged_order(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return the row and column of every patch, in the order of merged cells (2 x 2 patches)."""
    row = torch.arange(rows).view(rows // 2, 1, 2, 1).expand(-1, cols // 2, -1, 2).reshape(-1)
    col = torch.arange(cols).view(1, cols // 2, 1, 2).expand(rows // 2, -1, 2, -1).reshape(-1)
    return row, col


@lru_cache(maxsize=1024)
def _vision_rotary(rows: int, cols: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the vision encoder's 2D RoPE, each [patches, head]."""
    row, col = _merged_order(rows, cols)
    frequency = 1.0 / (10000.0 ** (torch.arange(0, head // 2, 2).float() / (head // 2)))
    angle = torch.cat([row[:, None] * frequency, col[:, None] * frequency], dim=-1)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(maxsize=1024)
def _interpolation(rows: int, cols: int, side: int, dtype: torch.dtype) -> Tensor:
    """Return bilinear weights from the learned position grid to an image's patches,
    [patches, side * side].
    """

    def axis(count: int) -> Tensor:  # [count, side]
        place = torch.linspace(0, side - 1, count)
        return (1 - (place[:, None] - torch.arange(side)).abs()).clamp(min=0)

    row, col = _merged_order(rows, cols)
    weights = axis(rows)[row][:, :, None] * axis(cols)[col][:, None, :]
    return weights.reshape(len(row), side * side).to(dtype)


def patchify(pixels: Tensor) -> Tensor:
    """Convert uint8 [N, H, W, 3] to uint8 [N, patches, 3 * 16 * 16], with patches in merged order.
    H and W must be multiples of 32.
    """
    count, height, width, _ = pixels.shape
    cells = pixels.view(count, height // 32, 2, 16, width // 32, 2, 16, 3)
    return cells.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, -1, 3 * 16 * 16)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute softmax attention with q already scaled.

    Takes [N, heads, T, D] and returns [N, T, heads * D] and the attention weights [N, heads, T, T].
    """
    scores = q @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    shares = scores.softmax(-1)
    return (shares @ v).transpose(1, 2).flatten(2), shares


def _merge(merger: Any, x: Tensor) -> Tensor:
    """Merge patches: [N, patches, D] -> [N, cells, out]."""
    cells = (x.shape[0], x.shape[1] // 4, merger.hidden_size)
    x = (
        merger.norm(x.reshape(cells))
        if merger.use_postshuffle_norm
        else merger.norm(x).reshape(cells)
    )
    return merger.linear_fc2(F.gelu(merger.linear_fc1(x)))


def encode_pictures(model: Model, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Encode uint8 [N, H, W, 3]. Returns embeddings [N, cells, D] and deepstack features, each
    [N, cells, D].
    """
    tower = model.model.visual
    weight = tower.patch_embed.proj.weight  # [D, 3, 2, 16, 16]
    dtype = weight.dtype
    rows, cols = pixels.shape[1] // 16, pixels.shape[2] // 16
    x = patchify(pixels).to(dtype) / 127.5 - 1
    x = F.linear(x, weight.sum(2).flatten(1), tower.patch_embed.proj.bias)  # [N, patches, D]
    x = x + _interpolation(rows, cols, tower.num_grid_per_side, dtype) @ tower.pos_embed.weight
    heads = tower.config.num_heads
    head = tower.config.hidden_size // heads
    cos, sin = _vision_rotary(rows, cols, head, dtype)
    deepstack: list[Tensor] = []
    for layer, block in enumerate(tower.blocks):
        qkv = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, heads, head)).permute(2, 0, 3, 1, 4)
        q, k = _rotate(qkv[0] * head**-0.5, cos, sin), _rotate(qkv[1], cos, sin)
        x = x + block.attn.proj(_attend(q, k, qkv[2], None)[0])
        x = x + block.mlp.linear_fc2(
            F.gelu(block.mlp.linear_fc1(block.norm2(x)), approximate="tanh")
        )
        if layer in tower.deepstack_visual_indexes:
            deepstack.append(_merge(tower.deepstack_merger_list[len(deepstack)], x))
    return _merge(tower.merger, x), deepstack


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _text_rotary(
    positions: Tensor, head: int, sections: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of interleaved mRoPE, each [B, 1, L, head], for positions [3, B, L]."""
    frequency = 1.0 / (10000.0 ** (torch.arange(0, head, 2).float() / head))
    angles = positions[..., None].float() * frequency  # [3, B, L, head / 2]
    angle = angles[0].clone()
    for axis in (1, 2):
        places = slice(axis, sections[axis] * 3, 3)
        angle[..., places] = angles[axis][..., places]
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Read(NamedTuple):
    """Outputs of the language model for a batch."""

    hidden: Tensor  # [B * L, D] after the last norm
    early: Tensor  # [B * L, D] after two layers
    looking: Tensor  # [B, L, L]: attention weights of the first head of the third layer


def read_tokens(
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    rows: Tensor,
    embeddings: Tensor,
    deepstack: list[Tensor],
) -> Read:
    """Run the language model on tokens [B, L] with positions [3, B, L].

    `rows` [R] are the indices of image tokens in the flattened batch. `embeddings` and each of
    `deepstack` are [R, D].
    """
    text = model.model.language_model
    config = model.config.text_config
    batch, length = tokens.shape
    x = text.embed_tokens(tokens).flatten(0, 1).index_copy(0, rows, embeddings)
    cos, sin = _text_rotary(
        positions, config.head_dim, config.rope_parameters["mrope_section"], x.dtype
    )
    mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
    groups = config.num_attention_heads // config.num_key_value_heads
    early, looking = x, x
    for layer, block in enumerate(text.layers):
        attention = block.self_attn
        y = _norm(block.input_layernorm, x).view(batch, length, -1)
        q = _norm(
            attention.q_norm, attention.q_proj(y).unflatten(-1, (-1, config.head_dim))
        ).transpose(1, 2)
        k = _norm(
            attention.k_norm, attention.k_proj(y).unflatten(-1, (-1, config.head_dim))
        ).transpose(1, 2)
        v = attention.v_proj(y).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        q, k = _rotate(q, cos, sin) * config.head_dim**-0.5, _rotate(k, cos, sin)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed, shares = _attend(q, k, v, mask)
        x = x + attention.o_proj(mixed).flatten(0, 1)
        y = _norm(block.post_attention_layernorm, x)
        x = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y))
        if layer < len(deepstack):
            x = x.index_add(0, rows, deepstack[layer])
        if layer == 1:
            early = x
        if layer == 2:
            looking = shares[:, 0]
    return Read(_norm(text.norm, x), early, looking)


def logits(model: Model, hidden: Tensor) -> Tensor:
    """Return float32 logits [R, vocabulary] for hidden states [R, D]."""
    return F.linear(hidden, model.model.language_model.embed_tokens.weight).float()
