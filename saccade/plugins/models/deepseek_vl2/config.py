"""Reads the sizes of DeepSeek-VL2's vision encoder from `config.json`. Does not import torch."""

from __future__ import annotations

from saccade.core.errors import CheckpointError
from saccade.families.checkpoint import Section
from saccade.families.kit.config_readers import refuse_flags
from saccade.nn.shapes import SiglipConfig

NO_TOWER = SiglipConfig(0, 0, 0, 0, "gelu_pytorch_tanh", 1e-6, 0, 1, 1, 0)


def read_vision(config: Section, out: int) -> SiglipConfig:
    """Read the vision encoder's sizes from config.json. Raises CheckpointError.

    out: the number of values per embedding.
    """
    if not config.has("language_config"):
        return NO_TOWER
    vision, projector = config.section("vision_config"), config.section("projector_config")
    kind = projector.text("projector_type", default="downsample_mlp_gelu")
    if kind != "downsample_mlp_gelu" or projector.flag("token_pooling"):
        raise CheckpointError(
            f"{projector.where}: projector_type {kind!r} is not supported, or token_pooling is set "
            "(downsample_mlp_gelu without it is)"
        )
    refuse_flags(vision, "class_token")
    hidden = vision.count("width", default=1024)
    for name, absent, wanted in (
        ("input_dim", 1152, hidden),
        ("n_embed", 2048, out),
        ("depth", 2, 2),
        ("mlp_ratio", 1, 1),
    ):
        if (found := projector.integer(name, default=absent)) != wanted:
            raise CheckpointError(f"{projector.where}: {name} must be {wanted}, not {found}")
    heads = vision.count("heads", default=16)
    side, patch = (
        vision.integer("image_size", default=384),
        vision.integer("patch_size", default=16),
    )
    merge = projector.integer("downsample_ratio", default=2)
    if min(patch, merge) < 1 or side < patch or hidden % heads:
        raise CheckpointError(
            f"{vision.where}: tiles of {side} pixels with patches of {patch} ({merge} x {merge} "
            f"merged), or {hidden} values in {heads} heads, are not possible"
        )
    return SiglipConfig(
        depth=vision.layers("layers", default=24),
        hidden=hidden,
        heads=heads,
        intermediate=int(hidden * vision.number("mlp_ratio", default=4.0)),
        activation="gelu_pytorch_tanh",
        norm_eps=1e-6,
        side=side,
        patch=patch,
        merge=merge,
        out_hidden=out,
        fused=True,
    )
