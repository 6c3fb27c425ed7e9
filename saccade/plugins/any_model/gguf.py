"""Reads GGUF files of models that transformers' own modules compute."""

from saccade.plugins.any_model import gguf_glm, gguf_pixtral, gguf_texts
from saccade.plugins.gguf.kinds import GgufFacts

KNOWN = (gguf_texts.FACTS, gguf_pixtral.FACTS, gguf_glm.FACTS)
FACTS = GgufFacts(
    models={key: model for each in KNOWN for key, model in each.models.items()},
    texts={key: text for each in KNOWN for key, text in each.texts.items()},
    towers={key: tower for each in KNOWN for key, tower in each.towers.items()},
)
