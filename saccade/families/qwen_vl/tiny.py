"""Tiny checkpoints of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from saccade_bench.fixtures.references import Reference, resize_picture
from saccade_bench.fixtures.tiny import TEXT, Ids, Layout, Tiny


class QwenReference(Reference):
    """transformers on a Qwen-VL checkpoint, float32."""

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    types = "mm_token_type_ids"

    def resize(self, picture: np.ndarray) -> np.ndarray:
        size, factor = self.processor.size, self.processor.patch_size * self.processor.merge_size
        height, width = picture.shape[:2]
        target = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return resize_picture(picture, target, "bicubic")

    def widened(self, image: np.ndarray) -> str:
        factor = self.processor.patch_size * self.processor.merge_size
        count: int = image.shape[0] * image.shape[1] // factor**2
        return "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"

    def patches(self, pixels: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (pixel_values, image_grid_thw), with the arithmetic of the torchvision processor
        and the layout of the Pillow one.
        """
        rows, grids = [], []
        for image in pixels:
            planes = self.normal(image[None])[0].numpy()
            flat, height, width = self.processor.patchify(planes, self.processor.patch_size, 2, 2)
            rows.append(torch.from_numpy(flat.copy()))
            grids.append([1, height, width])
        return torch.cat(rows), torch.tensor(grids)

    def features(self, pixels: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        values, grids = self.patches(pixels)
        return {"pixel_values": values, "image_grid_thw": grids}

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        values, grids = self.patches(pixels)
        features = self.model.model.get_image_features(values, grids)
        counts = (
            grids.prod(dim=1) // self.model.config.vision_config.spatial_merge_size**2
        ).tolist()
        levels = [features.pooler_output, *features.get("deepstack_features", ())]
        # One tensor for all pictures, or one for each: that depends on transformers' version.
        apart = [x.split(counts) if isinstance(x, torch.Tensor) else x for x in levels]
        return [torch.cat(parts, dim=1) for parts in zip(*apart, strict=True)]


class QwenTiny(Tiny):
    """What the architectures have in common, with the first two's figures."""

    reference_class = QwenReference
    processor_class = Qwen2VLImageProcessorPil
    often = True
    patch = 14
    means = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    variants = {  # noqa: RUF012
        "as it is": {},
        "old": {"layout": "old"},
        "sharded": {"sharded": True},
        "tied": {"tie": True},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
        return TEXT | {"rms_norm_eps": 1e-6, "rope_parameters": rope}

    def vision(self) -> dict[str, Any]:
        sizes = {"hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 80}
        return {"depth": 4, "num_heads": 4, "patch_size": self.patch} | sizes

    def fields(self, ids: Ids) -> dict[str, Any]:
        names = ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")
        ends = (f"vision_{end}" for end in ("start", "end"))
        return {name: ids(token) for name, token in names} | {
            f"{name}_token_id": ids(f"<|{name}|>") for name in ends
        }

    def processor(self, layout: Layout) -> dict[str, Any]:
        factor, (mean, std) = 2 * self.patch, self.means
        least, most = 4 * factor**2, 64 * factor**2
        return {
            "patch_size": self.patch,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_mean": mean,
            "image_std": std,
        } | (
            {"min_pixels": least, "max_pixels": most}
            if layout == "old"
            else {"size": {"shortest_edge": least, "longest_edge": most}}
        )

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        """The oldest files keep the text model's fields at the top."""
        text = old_rope(data)
        text["rope_scaling"]["type"] = "mrope"
        text["rope_scaling"].pop("rope_type")
        data["vision_config"] |= {
            "model_type": data["model_type"],
            "spatial_patch_size": data["vision_config"]["patch_size"],
            "in_chans": 3,
        }
        return text | data

    def old_name(self, name: str) -> str:
        name = name.replace("model.language_model.", "model.")
        return name.replace("model.visual.", "visual.")


def old_rope(data: dict[str, Any]) -> dict[str, Any]:
    """Take the text model's fields out of config.json, with rotary embeddings as older files."""
    text: dict[str, Any] = data.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    data["vision_config"].pop("rope_parameters", None)
    return text


class Qwen2Tiny(QwenTiny):
    """Qwen2-VL."""

    architecture = "Qwen2VLForConditionalGeneration"

    def vision(self) -> dict[str, Any]:
        sizes = {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2}
        return {"depth": 4, "num_heads": 4, "patch_size": self.patch} | sizes


class Qwen25Tiny(QwenTiny):
    """Qwen2.5-VL, whose tower sees windows."""

    architecture = "Qwen2_5_VLForConditionalGeneration"

    def vision(self) -> dict[str, Any]:
        return super().vision() | {"fullatt_block_indexes": [1, 3], "window_size": 56}


class Qwen3Tiny(QwenTiny):
    """Qwen3-VL."""

    architecture = "Qwen3VLForConditionalGeneration"
    patch = 16
    means = [0.5] * 3, [0.5] * 3

    def text(self, ids: Ids) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}
        rope |= {"mrope_interleaved": True}
        return super().text(ids) | {"head_dim": 16, "rope_parameters": rope}

    def vision(self) -> dict[str, Any]:
        levels = {"deepstack_visual_indexes": [0, 2]}
        return super().vision() | {"num_position_embeddings": 36} | levels

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        return data | {"text_config": old_rope(data)}

    def old_name(self, name: str) -> str:
        return name


class Qwen3MoeTiny(Qwen3Tiny):
    """Qwen3-VL-MoE."""

    architecture = "Qwen3VLMoeForConditionalGeneration"
    often = False

    def text(self, ids: Ids) -> dict[str, Any]:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        return super().text(ids) | experts | {"decoder_sparse_step": 1, "mlp_only_layers": [1]}

    def hub_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The hub has experts as [E, in, out]."""
        return {
            name: value.transpose(1, 2).contiguous() if ".mlp.experts." in name else value
            for name, value in tensors.items()
        }


TINY = {
    "qwen2_vl": Qwen2Tiny(),
    "qwen2_5_vl": Qwen25Tiny(),
    "qwen3_vl": Qwen3Tiny(),
    "qwen3_vl_moe": Qwen3MoeTiny(),
}
