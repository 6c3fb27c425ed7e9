"""Create a checkpoint with another configuration, so that results do not only apply to ours.

    python -m saccade_bench.peers.recipe SMALL OUT

SMALL is a folder made by `saccade make-checkpoint --preset small-qwen3-vl`, whose configuration and
tokenizer are used. transformers creates and saves the model: a Qwen3-VL with random weights, with
57 M parameters in the vision encoder and 71 M in the language model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

TEXT = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
}
VISION = {
    "depth": 8,
    "hidden_size": 512,
    "num_heads": 8,
    "intermediate_size": 2816,
    "out_hidden_size": 768,
    "deepstack_visual_indexes": [2, 4, 6],
}


def make(small: Path, out: Path) -> int:
    """Write the folder `out` and return the model's number of parameters.

    Matrices have a standard deviation of 0.6 / sqrt(inputs), and embeddings of 0.02.
    """
    shutil.copytree(small, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((out / "config.json").read_text())
    config["text_config"].update(TEXT)
    config["vision_config"].update(VISION)
    (out / "config.json").write_text(json.dumps(config))
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(out))
    drawn = torch.Generator().manual_seed(7)
    for name, value in model.named_parameters():
        if value.dim() >= 2:
            deviation = 0.02 if "embed" in name else 0.6 / value.shape[-1] ** 0.5
            torch.nn.init.normal_(value, 0.0, deviation, generator=drawn)
    model.bfloat16().save_pretrained(out)
    return sum(value.numel() for value in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("small", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(f"{make(args.small, args.out) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
