"""Tiny checkpoints of Qwen3.5, dense and with experts, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from saccade.families.qwen_vl.tiny import Qwen3Tiny
from saccade_bench.fixtures.tiny import HYBRID, Ids


class Qwen35Tiny(Qwen3Tiny):
    """Qwen3.5, with a head that drafts."""

    architecture = "Qwen3_5ForConditionalGeneration"
    text_architecture = "Qwen3_5ForCausalLM"
    often = False

    def text(self, _: Ids) -> dict[str, Any]:
        return HYBRID | {"rms_norm_eps": 1e-6}

    def vision(self) -> dict[str, Any]:
        return {k: v for k, v in super().vision().items() if k != "deepstack_visual_indexes"}

    def hub_config(self, data: dict[str, Any]) -> dict[str, Any]:
        data["text_config"]["mtp_num_hidden_layers"] = 1
        return data

    def hub_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | draft_head(tensors)


class Qwen35MoeTiny(Qwen35Tiny):
    """Qwen3.5 with experts."""

    architecture = "Qwen3_5MoeForConditionalGeneration"
    text_architecture = "Qwen3_5MoeForCausalLM"

    def text(self, ids: Ids) -> dict[str, Any]:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        return super().text(ids) | experts | {"shared_expert_intermediate_size": 48}


def draft_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a head that drafts, as the hub has it (transformers has no module for it)."""
    generator = torch.Generator().manual_seed(7)

    def like(value: torch.Tensor) -> torch.Tensor:
        spread = 0.1 if value.dim() == 1 else 1.2 / value.shape[-1] ** 0.5
        return torch.empty_like(value).normal_(0.0, spread, generator=generator)

    found = {}
    attending = next(name for name in tensors if name.endswith("self_attn.q_proj.weight"))
    layer = attending.removesuffix("self_attn.q_proj.weight")
    for name, value in tensors.items():
        if name.startswith(layer):
            found["mtp.layers.0." + name.removeprefix(layer)] = like(value)
    norm = next(
        value for name, value in tensors.items() if name.endswith("language_model.norm.weight")
    )
    for part in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{part}.weight"] = like(norm)
    found["mtp.fc.weight"] = like(norm.new_empty(len(norm), 2 * len(norm)))
    return found


TINY = {"qwen3_5": Qwen35Tiny(), "qwen3_5_moe": Qwen35MoeTiny()}
