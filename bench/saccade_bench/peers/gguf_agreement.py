"""Files that llama.cpp quantises, read by llama.cpp, Saccade and transformers: the same logits?

    python -m saccade_bench.peers.gguf_agreement --node NODE [--source SOURCE]

NODE as in `llama_cpp.py`. Random checkpoints of each architecture, as the GGUF files of
`fixtures/gguf_files.py`, or of llama.cpp's own converter in SOURCE (`llama_convert.py`). Saccade
computes in float32; llama.cpp rounds activations to 8 bits where matrices are quantised, and keys
and values to 16; transformers has the file's dequantised weights in float32, and its greedy answer
about an image is Saccade's, token for token. Ends with a verdict, and exit status 1 where they
differ more than that explains.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from saccade.families.registry import load_spec
from saccade.gguf.folder import write_folder
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.fixtures.gguf_files import (
    QWEN2_SPLIT,
    QWEN35_SPLIT,
    as_qwen,
    dequantised,
    write_files,
)
from saccade_bench.fixtures.harness import Harness
from saccade_bench.fixtures.references import Reference
from saccade_bench.fixtures.tiny import VOCAB, make_checkpoint, picture, reference
from saccade_bench.peers.language_model import Runs, Saccade, logits_of
from saccade_bench.peers.llama_convert import convert
from saccade_bench.peers.llama_cpp import Llama, LlamaCpp

FAMILIES: tuple[str, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
HYBRIDS: tuple[str, ...] = ("qwen3_5", "qwen3_5_moe")
"""Answers alone are compared: logits are of a language model that is only attention."""
KINDS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_XS")
TOKENS = range(5, 45)
ANSWER = 16
BOUNDS = {"F32": 0.005, "F16": 0.005}
"""Share of the logits' rms that llama.cpp may differ by; its experts go other ways at ties."""
SAME = 1e-4
"""The share that transformers may."""
ROUNDED, EXPERTS = 0.06, 0.25
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""K-quants have blocks of 256."""


def shapes(family: str) -> dict[str, Any]:
    """Overrides of `make_checkpoint`."""
    first = family == "qwen2_vl"
    vision: dict[str, Any] = {"hidden_size" if first else "out_hidden_size": WIDE["hidden_size"]}
    if family in HYBRIDS:
        experts = {"moe_intermediate_size": 256} if family == "qwen3_5_moe" else {}
        return {"text": WIDE | experts, "vision": vision}
    if family == "qwen2_5_vl":
        vision["window_size"] = 112  # llama.cpp's files do not say it
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return {"text": WIDE | {"rope_parameters": rope}, "vision": vision}
    rope |= {"mrope_section": [16, 8, 8], "mrope_interleaved": True}
    text: dict[str, Any] = WIDE | {"head_dim": 64, "rope_parameters": rope}
    if family == "qwen3_vl_moe":
        text |= {"mlp_only_layers": [], "moe_intermediate_size": 512}
    return {"text": text, "vision": vision}


@dataclass(frozen=True)
class Differences:
    """Of a file's logits, as a share of their rms (None: not compared); and whether the answer
    about an image is the same.
    """

    llama: float | None
    transformers: float | None
    answers: bool

    def within(self, bound: float) -> bool:
        """`bound`: of llama.cpp's logits."""
        return (self.llama or 0) <= bound and (self.transformers or 0) <= SAME and self.answers


def share(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Rms of the difference as a share of the rms."""
    return float(np.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean()))


def measure(
    llama: LlamaCpp, source: Path | None, family: str, work: Path
) -> dict[str, Differences]:
    """By format of the file."""
    hybrid = family in HYBRIDS
    folder = make_checkpoint(work / "model", family, **shapes(family))
    as_qwen(folder, QWEN35_SPLIT if hybrid else QWEN2_SPLIT)
    files = write_files(folder, work, Kind.F32)
    if source is not None:
        cut = "qwen35" if hybrid else "qwen2"
        made = convert(source, folder, work / "converted", "f32", cut, heads=not hybrid)
        files = replace(files, model=made / files.model.name, mmproj=made / files.mmproj.name)
    found = {}
    for kind in KINDS:
        path = files.model
        if kind != "F32":
            path = work / f"{kind}.gguf"
            llama.quantise(files.model, path, kind, threads=1)
        made = write_folder([path], files.mmproj)
        whole = reference(dequantised(folder, files, path))
        answers = same_answer(made, whole)
        if hybrid:
            found[kind] = Differences(None, None, answers)
            continue
        ours: Runs = Saccade(made, rows=1, context=256, dtype=torch.float32)
        logits = logits_of(ours, TOKENS)
        with Llama(llama, path, vocab=VOCAB, rows=1, context=256, threads=1) as theirs:
            apart = share(logits, logits_of(theirs, TOKENS))
        exact = share(logits, whole.logits(list(TOKENS)).numpy())
        found[kind] = Differences(apart, exact, answers)
    return found


def same_answer(made: Path, whole: Reference) -> bool:
    """Greedy, about an image."""
    shown = whole.resize(picture(150, 97))
    device = torch.device("cpu")
    harness = Harness(load_net(load_spec(made), made, dtype=torch.float32, device=device))
    image = harness.image(shown, "image")
    tokens = [11, 12, whole.mark, 30, 31, 32]
    asked = harness.request("one", tokens, [image], max_tokens=ANSWER)
    answer = whole.generate(asked.tokens, [shown], max_new_tokens=ANSWER)
    return harness.run([asked])["one"].tokens[: len(answer)] == answer


def bound(family: str, kind: str) -> float:
    return BOUNDS.get(kind, EXPERTS if family.endswith("_moe") else ROUNDED)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--source", type=Path)
    told = parser.parse_args()
    llama = LlamaCpp(told.node)
    worse = []
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = work
        for family in FAMILIES + HYBRIDS:
            found = measure(llama, told.source, family, Path(work) / family)
            for kind, each in found.items():
                said = ["same answer" if each.answers else "ANOTHER ANSWER"]
                if each.llama is not None and each.transformers is not None:
                    said += [f"llama.cpp {each.llama:.4f}, transformers {each.transformers:.1e}"]
                print(f"{family} {kind}: {', '.join(said)}", flush=True)
                if not each.within(bound(family, kind)):
                    worse.append(f"{family} {kind}")
    print(f"llama.cpp {llama.version}: " + (f"differ: {', '.join(worse)}" if worse else "agree"))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
