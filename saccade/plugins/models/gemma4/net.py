"""Builds Gemma 4's network, and maps tensor names to canonical ones."""

from __future__ import annotations

import re

from saccade.nn.family_model import DENSE_LAYER, FamilyModel, language_matrices
from saccade.nn.protocol import LanguageModel, VisionNet
from saccade.nn.weights import Weights
from saccade.parallel import Shard
from saccade.plugins.models.gemma4.config import EmbedderConfig
from saccade.plugins.models.gemma4.embedder import ImageEmbedder
from saccade.plugins.models.gemma4.spec import Gemma4Spec
from saccade.plugins.models.gemma4.text import Gemma4Decoder
from saccade.plugins.models.gemma4.vision import Gemma4Tower

PARTS = "vision_(tower|embedder)|embed_vision|audio_tower|embed_audio|language_model|lm_head"
KEYS = re.compile(r"language_model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")


class Gemma4Model(FamilyModel):
    """Builds the network. Tensor names are converted to `vision_tower.*` (or `vision_embedder.*`),
    `embed_vision.*`, `language_model.*` and `lm_head.weight`.
    """

    spec: Gemma4Spec

    names = (
        (r"^model\.", ""),
        (rf"^(?!({PARTS})\.)", "language_model."),
        (r"^embed_vision\.(?=patch_|pos_)", "vision_embedder."),
        (r"^embed_vision\.multimodal_embedder\.", "embed_vision."),
    )
    quantisable = language_matrices(rf"{DENSE_LAYER}|experts\.(gate_up|down)_proj")
    seeing = ("vision_tower.", "vision_embedder.", "embed_vision.")
    unused = ("audio_tower.", "embed_audio.")  # audio is not supported

    def tower(self, weights: Weights, shard: Shard) -> VisionNet:
        if isinstance(self.spec.vision, EmbedderConfig):
            return ImageEmbedder(weights, self.spec.vision)
        return Gemma4Tower(weights, self.spec.vision, shard)

    def text(self, weights: Weights, shard: Shard) -> LanguageModel:
        return Gemma4Decoder(weights, self.spec.text, shard)

    def harmless(self, name: str) -> bool:
        """Return True also for stored keys and values of layers that reuse another layer's KV
        cache.
        """
        if found := KEYS.match(name):
            layer, layers = int(found[1]), self.spec.text.layers
            return layer < len(layers) and layers[layer].source != layer
        return super().harmless(name)
