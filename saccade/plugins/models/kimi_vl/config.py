"""Reads the sizes of Kimi-VL's vision encoder from `config.json`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import check_halves, require_kind
from saccade.nn.shapes import MergedConfig


@dataclass(frozen=True, slots=True)
class MoonConfig(MergedConfig):
    """The sizes of MoonViT and its projector.

    learned: the (rows, columns) of its grid of learned positions.
    """

    learned: tuple[int, int]


def read_vision(config: Section, out: int) -> MoonConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    vision = config.section("vision_config")
    require_kind(vision, "moonvit")
    hidden = vision.count("hidden_size", default=1152)
    heads = vision.count("num_attention_heads", default=16)
    check_halves(vision, "hidden_size", hidden, heads)
    rows = vision.count("init_pos_emb_height", default=64)
    columns = vision.count("init_pos_emb_width", default=64)
    return MoonConfig(
        depth=vision.layers("num_hidden_layers", default=27),
        hidden=hidden,
        heads=heads,
        intermediate=vision.count("intermediate_size", default=4304),
        activation="gelu_pytorch_tanh",
        norm_eps=1e-5,
        patch=vision.count("patch_size", default=14),
        merge=read_merge(vision),
        learned=(rows, columns),
        out_hidden=out,
    )


def read_merge(section: Section) -> int:
    """Return the edge, in patches, of the square that becomes one token. Raises CheckpointError."""
    kernel = section.integers("merge_kernel_size", default=(2, 2))
    if len(kernel) != 2 or kernel[0] != kernel[1] or kernel[0] < 1:
        raise CheckpointError(
            f"{section.where}: merge_kernel_size {list(kernel)} must be two equal numbers"
        )
    return kernel[0]
