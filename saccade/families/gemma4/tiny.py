"""Tiny Gemma 4 checkpoints, for tests and benchmarks. The first variant with a tower has all that
any of the dense models has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import create_masks_for_generate
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    convert_image_to_patches,
    get_aspect_ratio_preserving_size,
    pad_along_first_dim,
)

from saccade_bench.fixtures.references import (
    Reference,
    import_without_torchvision,
    resize_picture,
)
from saccade_bench.fixtures.tiny import BLANK_LINES, CORPUS, TEXT, TOWER, Ids, Layout, Tiny

TOKENS = 9
"""Most tokens of an image, of 48 x 48 pixels each."""
WINDOW = 8
"""Fewer than an image's tokens: its first are beyond the window of its last."""
SHARED = 3
"""The last layers, which see the keys and values of earlier ones."""
FULL, NEAR = "full_attention", "sliding_attention"
LAYERS = [NEAR, FULL, NEAR, FULL, NEAR, NEAR, FULL]
BEGIN, IMAGE, END = "<|image>", "<|image|>", "<image|>"
SPECIAL = (
    *(BEGIN, IMAGE, END, "<|turn>", "<turn|>", "<bos>", "<|video|>", "<|audio|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|think|>", "<|channel>", "<channel|>"),
)
CHAT_TEMPLATE = r"""
{%- macro spelled(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping -%}{{ '{' }}{{ pairs(value) }}{{ '}' }}
    {%- elif value is sequence -%}
        {{ '[' }}
        {%- for each in value -%}{{ ',' if not loop.first }}{{ spelled(each) }}{%- endfor -%}
        {{ ']' }}
    {%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(value) -%}
    {%- for key, each in value | dictsort -%}
        {{ ',' if not loop.first }}{{ key }}:{{ spelled(each) }}
    {%- endfor -%}
{%- endmacro -%}
{%- macro shown(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}{%- for part in content or [] -%}
        {%- if part.type == 'image' -%}{{ '\n\n<|image|>\n\n' }}
        {%- else -%}{{ part.text | trim }}{%- endif -%}
    {%- endfor -%}{%- endif -%}
{%- endmacro -%}
{{ '<bos>' }}
{%- set turn = namespace(called=false, name='') -%}
{%- if tools or enable_thinking -%}
    {{ '<|turn>system\n' }}{{ '<|think|>\n' if enable_thinking }}
    {%- for tool in tools or [] -%}
        {{ '<|tool>declaration:' + tool.function.name + '{' }}
        {{- pairs(tool.function) }}{{ '}<tool|>' }}
    {%- endfor -%}
    {{ '<turn|>\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{ '<|tool_response>response:' + turn.name + '{value:' }}
        {{- spelled(message.content) }}{{ '}<tool_response|>' }}
    {%- else -%}
        {%- set role = 'model' if message.role == 'assistant' else message.role -%}
        {{ '' if turn.called else '<|turn>' + role + '\n' }}
        {%- if message.reasoning_content and message.tool_calls -%}
            {{ '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' }}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set turn.name = call.function.name -%}
            {{ '<|tool_call>call:' + turn.name + '{' }}{{ pairs(call.function.arguments) }}
            {{- '}<tool_call|>' }}
        {%- endfor -%}
        {{ shown(message.content) }}
        {%- set turn.called = (message.tool_calls or []) | length > 0 -%}
        {{ '' if turn.called else '<turn|>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not turn.called -%}{{ '<|turn>model\n' }}{%- endif -%}"""
"""Makes what Gemma 4's own chat templates make of tools, calls, responses and thoughts."""
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "do_normalize": False,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "rescale_factor": 1 / 255,
    "resample": 3,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": TOKENS,
}

E2B: dict[str, Any] = {"use_bidirectional_attention": None, "attention_k_eq_v": False}
"""The small models: images see themselves in one direction, as text does."""
LARGE: dict[str, Any] = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
"""The dense model of 31B: every layer has a cache, and no embedding of its own."""
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}


HUB_NAMES = (
    (r"embed_vision\.(?=patch_|pos_)", "vision_embedder."),
    (r"embed_vision\.multimodal_embedder\.", "embed_vision."),
)
"""Of an embedder's tensors."""


class BudgetReference(Reference):
    """transformers on a Gemma 4 checkpoint, float32. `pixels` are canvases of whole tokens."""

    placeholder = IMAGE
    types = "mm_token_type_ids"

    @property
    def most(self) -> int:
        """Patches."""
        most: int = self.processor.max_soft_tokens * self.processor.pooling_kernel_size**2
        return most

    def resize(self, picture: np.ndarray) -> np.ndarray:
        (height, width), pool = picture.shape[:2], self.processor.pooling_kernel_size
        size = get_aspect_ratio_preserving_size(
            height, width, self.processor.patch_size, self.most, pool
        )
        return resize_picture(picture, size, "bicubic")

    def widened(self, image: np.ndarray) -> str:
        edge = self.processor.patch_size * self.processor.pooling_kernel_size
        count: int = image.shape[0] // edge * (image.shape[1] // edge)
        return BEGIN + IMAGE * count + END

    def features(self, pixels: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Padded as the processor pads them."""
        patch = self.processor.patch_size
        values, places = [], []
        for image in pixels:
            planes = image.transpose(2, 0, 1).astype(np.float32) * np.float32(1 / 255)
            rows = convert_image_to_patches(planes, patch)
            across, down = np.meshgrid(
                np.arange(image.shape[1] // patch), np.arange(image.shape[0] // patch)
            )
            at = np.stack((across, down), axis=-1).reshape(len(rows), 2)
            padded = pad_along_first_dim(rows, at, self.most)
            values.append(padded[0]), places.append(padded[1])
        stacked = torch.from_numpy(np.stack(values)), torch.from_numpy(np.stack(places))
        return dict(zip(("pixel_values", "image_position_ids"), stacked))


class EmbedderReference(BudgetReference):
    """The same on one with an embedder, whose patches the processor brings together."""

    def features(self, pixels: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Bring patches together by transformers' own function, and pad as it does."""
        module = "transformers.models.gemma4_unified.image_processing_gemma4_unified"
        theirs, most = import_without_torchvision(module), self.processor.max_soft_tokens
        values, places = [], []
        for image in pixels:
            planes = torch.from_numpy(image).permute(2, 0, 1) * (1 / 255)
            rows = theirs.convert_image_to_patches(planes, self.processor.patch_size)[None]
            size = (edge // self.processor.patch_size for edge in image.shape[:2])
            down, across = torch.meshgrid(*map(torch.arange, size), indexing="ij")
            at = torch.stack((across, down), dim=-1).view(1, -1, 2)
            count = rows.shape[1] // self.processor.pooling_kernel_size**2
            merged, places_of = theirs.patches_merge(rows, at, count)
            padded = theirs.pad_along_first_dim(merged[0], places_of[0], most)
            values.append(padded[0]), places.append(padded[1])
        return {"pixel_values": torch.stack(values), "image_position_ids": torch.stack(places)}


class Gemma4Tiny(Tiny):
    """Gemma 4."""

    architecture = "Gemma4ForConditionalGeneration"
    text_architecture = "Gemma4ForCausalLM"
    reference_class = BudgetReference
    special = SPECIAL
    corpus = (CORPUS, BLANK_LINES)
    template = CHAT_TEMPLATE
    begin, end = "<bos>", "<turn|>"
    variants = {  # noqa: RUF012
        "all there is": {},
        "old and tied": {"layout": "old", "tie": True},
        "as E2B": {"text": E2B},
        "as 26B-A4B": {"text": LARGE | EXPERTS},
        "as 31B": {"text": LARGE},
        "plain": {
            "text": E2B | LARGE,
            "vision": {"use_clipped_linears": False, "standardize": False},
        },
        "no cap": {"text": {"final_logit_softcapping": None, "use_double_wide_mlp": False}},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        return TEXT | {
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
            "num_hidden_layers": len(LAYERS),
            "layer_types": LAYERS,
            "num_kv_shared_layers": SHARED,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": WINDOW,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 4.0,
            "pad_token_id": 0,
        }

    def vision(self) -> dict[str, Any]:
        return TOWER | {
            "num_key_value_heads": 4,
            "head_dim": 12,
            "position_embedding_size": 64,
            "use_clipped_linears": True,
            "standardize": True,
        }

    def fields(self, ids: Ids) -> dict[str, Any]:
        names = {"boi_token_id": BEGIN, "image_token_id": IMAGE, "eoi_token_id": END}
        names |= {"video_token_id": "<|video|>", "audio_token_id": "<|audio|>"}
        return {name: ids(token) for name, token in names.items()}

    def finish(self, model: torch.nn.Module) -> None:
        """Draw what is learned and no parameter: scales of layers, how far matrices clamp,
        standards. Queries are made small, for nothing divides scores: else all would look at one
        token.
        """
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "q_norm" in name:
                    weight.mul_(0.3)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.6, 1.2)
                elif name.endswith(("_min", "_max")):
                    buffer.uniform_(0.8, 1.6).mul_(-1.0 if name.endswith("min") else 1.0)
                elif name.endswith(("std_bias", "std_scale")):
                    buffer.normal_(0.0, 0.3).add_(name.endswith("scale"))

    def processor(self, _: Layout) -> dict[str, Any]:
        return PROCESSOR

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        text = data["text_config"]
        own = text.pop("per_layer_config")[str(LAYERS.index(FULL))]
        text["global_head_dim"] = own["head_dim"]
        text["num_global_key_value_heads"] = own.get("num_key_value_heads")
        return data

    def image_processor(self, folder: Path) -> Gemma4ImageProcessorPil:
        """With a budget that transformers' own class refuses, too."""
        fields = json.loads((folder / "preprocessor_config.json").read_text())
        budget = fields.pop("max_soft_tokens")
        processor = Gemma4ImageProcessorPil(**fields)
        processor.max_soft_tokens = budget
        return processor


class UnifiedTiny(Gemma4Tiny):
    """Gemma 4 12B, which has no tower and no embeddings by layer."""

    architecture = "Gemma4UnifiedForConditionalGeneration"
    text_architecture = "Gemma4UnifiedForCausalLM"
    reference_class = EmbedderReference
    variants = {  # noqa: RUF012
        "it hears": {},
        "as on the hub and tied": {"layout": "old", "tie": True},
        "layers that share": {"text": {"num_kv_shared_layers": SHARED}},
        "plain": {
            "text": E2B | {"final_logit_softcapping": None},
            "fields": {"audio_config": None},
        },
    }

    def text(self, ids: Ids) -> dict[str, Any]:
        without = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
        own = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        fields = super().text(ids) | own
        return {name: value for name, value in fields.items() if name not in without}

    def vision(self) -> dict[str, Any]:
        return {"mm_embed_dim": 72, "output_proj_dims": 72, "mm_posemb_size": 16}

    def fields(self, ids: Ids) -> dict[str, Any]:
        return super().fields(ids) | {"audio_config": {"audio_embed_dim": 24}}

    def processor(self, _: Layout) -> dict[str, Any]:
        return PROCESSOR | {"image_processor_type": "Gemma4UnifiedImageProcessor"}

    def old_name(self, name: str) -> str:
        """Return the hub's name of a tensor."""
        for pattern, hub in HUB_NAMES:
            name = re.sub(pattern, hub, name)
        return name

    def read_reference(self, folder: Path, dtype: torch.dtype) -> Reference:
        _unified().create_masks_for_generate = published_masks
        return super().read_reference(folder, dtype)


def _unified() -> Any:
    return import_module("transformers.models.gemma4_unified.modeling_gemma4_unified")


def published_masks(block_sequence_ids: torch.Tensor | None = None, **told: Any) -> Any:
    """Make the masks that transformers makes for Gemma 4, and for this model before a static cache:
    images see themselves in layers with windows alone, as in the published code. Its `forward`
    lets them do so in all layers (transformers' issue 46711).
    """
    if block_sequence_ids is None:
        return create_masks_for_generate(**told)
    return _unified().create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **told)


TINY = {"gemma4": Gemma4Tiny(), "gemma4_unified": UnifiedTiny()}
