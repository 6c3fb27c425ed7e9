"""Random checkpoints with published widths and tile rules, at a quarter of the depth.

    python -m saccade_bench.screens.shapes smolvlm FOLDER
    python -m saccade_bench.screens.shapes minicpmv4_6 FOLDER

The vision encoder and the language model are as wide as in SmolVLM-256M and MiniCPM-V 4.6, with the
same ratio of depths. Images are preprocessed as published, so that `python -m saccade_bench.screens
--base-url` shows the relative TTFT of these models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fixtures.tiny import make_checkpoint

Fields = dict[str, Any]
SHAPES: Mapping[str, tuple[Fields, Fields, Fields]] = {
    "smolvlm": (
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3}
        | {"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
    "minicpmv4_6": (
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 7}
        | {"num_attention_heads": 16, "image_size": 980, "patch_size": 14},
        {"hidden_size": 1024, "intermediate_size": 3584},
        {"scale_resolution": 448, "max_slice_nums": 9, "patch_size": 14},
    ),
}
"""Settings of the vision encoder, of the language model, and of the image processor."""


def make(family: str, folder: Path) -> Path:
    """Write a family's checkpoint."""
    vision, text, processor = SHAPES[family]
    make_checkpoint(folder, family, vision=vision, text=text)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | processor))
    return folder


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(words)
    make(given.family, given.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
