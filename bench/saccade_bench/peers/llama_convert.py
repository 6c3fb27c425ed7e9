"""Convert a checkpoint to GGUF files with llama.cpp's own converter and quantizer.

    python -m saccade_bench.peers.llama_convert SOURCE FOLDER OUT [--kind Q8_0]

SOURCE is llama.cpp's source folder. It is not packaged separately, but the source archive of
llama-cpp-python (`pip download --no-binary llama-cpp-python --no-deps llama-cpp-python`) has it in
`vendor/llama.cpp`. Build its server and quantizer with

    cmake -S SOURCE -B BUILD -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF
    cmake --build BUILD --target llama-server llama-quantize

Writes OUT/model.gguf and OUT/mmproj-model.gguf. The converter identifies a pre-tokenizer by a hash
of the tokens of a fixed text, which depends on the merges. Random checkpoints have no known hash,
so `--pre` sets the pre-tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file

SPOKEN = {"smolvlm": "LlamaForCausalLM", "lfm2_vl": "Lfm2ForCausalLM"}
"""By model type: the language model's architecture as named in published checkpoints."""
PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "lfm2_vl": {"model.vision_tower.": "model.vision_tower.vision_model."},
    "qwen2": {"model.visual.": "visual.", "model.language_model.": "model."},
    "gemma3": {
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
}
"""By prefix of the model type: prefixes of tensor names, and those in published checkpoints."""
RUN = """
import sys
source, pre = sys.argv[1:3]
sys.path[:0] = [source, source + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
def absent(self):  # Qwen's first try, which wants a package of its own to find that there is none
    raise FileNotFoundError("tokenizer.model")
TextModel._create_vocab_sentencepiece = absent
import gguf
add = gguf.SpecialVocab.add_to_gguf
def add_merged(self, *rest, **words):  # llama.cpp wants one merge at least: of two zero bytes
    self.merges = self.merges or ["\u0100 \u0100"]
    add(self, *rest, **words)
gguf.SpecialVocab.add_to_gguf = add_merged
import convert_hf_to_gguf
sys.argv[1:] = sys.argv[3:]
convert_hf_to_gguf.main()
"""


def convert(source: Path, folder: Path, out: Path, kind: str, pre: str) -> Path:
    """Write the language model as `kind` (f32, f16, bf16 or q8_0) and the vision encoder as f16,
    and return `out`.

    Raises CalledProcessError with the converter's output if it fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        read = as_published(folder, Path(scratch) / folder.name)
        for name, words in (
            ("model.gguf", ["--outtype", kind]),
            ("mmproj-model.gguf", ["--outtype", "f16", "--mmproj"]),
        ):
            command: list[str | Path] = [sys.executable, "-c", RUN, source, pre, read, *words]
            command += ["--outfile", out / name]
            subprocess.run(command, check=True, capture_output=True, text=True)
    return out


def as_published(folder: Path, out: Path) -> Path:
    """Copy a checkpoint with the tensor and architecture names of published ones, because the
    converter ignores vision encoders with transformers 5's names. If there is no difference, return
    `folder` itself.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    renamed = next((names for start, names in PUBLISHED.items() if kind.startswith(start)), None)
    if renamed is None and kind not in SPOKEN:
        return folder
    shutil.copytree(folder, out)
    if kind in SPOKEN:
        config["text_config"]["architectures"] = [SPOKEN[kind]]
        (out / "config.json").write_text(json.dumps(config))
    if renamed is None:
        return out
    found = {}
    for name, value in load_file(folder / "model.safetensors").items():
        start = next((each for each in renamed if name.startswith(each)), "")
        found[renamed[start] + name.removeprefix(start) if start else name] = value
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", default="q8_0", choices=["f32", "f16", "bf16", "q8_0"])
    parser.add_argument("--pre", default="qwen2", help="llama.cpp's name of how text is cut")
    args = parser.parse_args()
    try:
        print(convert(args.source, args.folder, args.out, args.kind, args.pre))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)


if __name__ == "__main__":
    main()
