"""What a Gemma 3 checkpoint says without tensors: sizes, prompts, windows.

An image's tokens see each other in both directions. Runs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.family import Cuts, KVSpec, Templates, heads_cache
from saccade.families.base_spec import BLIND, NO_TEMPLATES, BaseSpec, Placeholder, plain_cuts
from saccade.families.checkpoint import Checkpoint, read_json
from saccade.families.config_readers import read_token, text_section
from saccade.families.gemma3.config import GemmaText, read_text, read_vision
from saccade.families.gemma3.images import NO_IMAGES, SquareRules, read_images
from saccade.nn.siglip_config import SiglipConfig

BOI = "<start_of_image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(BaseSpec):
    """CPU facts of one Gemma 3 checkpoint."""

    vision: SiglipConfig
    text: GemmaText
    images: SquareRules

    def kv_spec(self, ranks: int = 1) -> KVSpec:
        shape = self.text.shape
        sizes = shape.kv_heads, shape.head_dim, ranks
        return KVSpec(
            tuple(
                heads_cache(*sizes, window=window, both_ways=self.sees_images)
                for window in self.text.windows
            )
        )

    @property
    def cuts(self) -> Cuts:
        return plain_cuts(self.text.shape, self.vision)


def gemma3_spec(checkpoint: Checkpoint) -> Gemma3Spec:
    """Read a Gemma 3 checkpoint's facts. Raises CheckpointError naming file and field."""
    config = checkpoint.config
    section = text_section(config)
    text = read_text(config, section)
    vision = read_vision(config, text.hidden)
    images, placeholder, templates = NO_IMAGES, BLIND, NO_TEMPLATES
    if vision.depth:
        images = read_images(checkpoint.processor, vision)
        placeholder = _placeholder(checkpoint, text.vocab_size)
        # Blank lines around an image are text, which becomes tokens with what stands beside it.
        templates = Templates(around=(_written(checkpoint, *placeholder.marks), "\n\n"))
    return Gemma3Spec(
        family="gemma3" if vision.depth else "gemma3_text",
        vision=vision,
        text=text,
        images=images,
        placeholder=placeholder,
        templates=templates,
        eos_token_ids=checkpoint.eos_token_ids(section),
        dtype=checkpoint.dtype(section),
    )


def _placeholder(checkpoint: Checkpoint, vocab: int) -> Placeholder:
    """Return the placeholder. An image's first token stands for it in templates."""
    config = checkpoint.config
    begin = read_token(config, vocab, "boi_token_index", "boi_token_id", default=255999)
    row = read_token(config, vocab, "image_token_index", "image_token_id", default=262144)
    end = read_token(config, vocab, "eoi_token_index", "eoi_token_id", default=256000)
    return Placeholder((begin,), row, (begin,), (end,))


def _written(checkpoint: Checkpoint, token: int) -> str:
    settings = read_json(checkpoint.folder / "tokenizer_config.json", required=False)
    added = settings.section("added_tokens_decoder").section(str(token))
    return added.text("content", default=settings.text("boi_token", default=BOI))
