"""Reads SmolVLM and Idefics3 from GGUF files: a Llama, and the vision encoder of Idefics3."""

from __future__ import annotations

from saccade.plugins.gguf.fields import require_tokens
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, Seen, Source
from saccade.plugins.gguf.layers import TowerNames, colours, siglip_config

NAMES = TowerNames(
    outer={
        "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
        "v.position_embd": "model.vision_model.embeddings.position_embedding",
        "v.post_ln": "model.vision_model.post_layernorm",
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    within="model.vision_model.encoder.layers",
)
LANCZOS = 1
EDGES = 4
"""The default number of tiles along the longer edge, as in all published models."""


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight = source.sight
    vision = siglip_config(sight, "smolvlm_vision")
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": sight.integer("preproc_image_size", EDGES * vision["image_size"])},
        "max_image_size": {"longest_edge": vision["image_size"]},
        "do_image_splitting": True,
        "resample": LANCZOS,
        **colours(sight),
    }
    config = {
        "vision_config": vision,
        "scale_factor": sight.integer("projector.scale_factor"),
        **require_tokens(source.model, {"image_token_id": "<image>"}),
    }
    return Seen(config, {"preprocessor_config.json": processor}, tuple(sight.missing))


FACTS = GgufFacts(
    models={("llama", "idefics3"): ModelKind("SmolVLMForConditionalGeneration", "smolvlm", see)},
    towers={"idefics3": NAMES},
)
