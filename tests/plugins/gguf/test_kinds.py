"""Models of all kinds of GGUF files answer as transformers does with the same weights, rounded as
the files have them: language models that its modules compute, and families with a tower.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from saccade.core.errors import CheckpointError
from saccade.families.registry import load_spec
from saccade.plugins.gguf.folder import write_folder
from tests.families.forwarding import Session, load
from tests.fixtures.families.gemma4 import E2B, EXPERTS, LARGE
from tests.fixtures.gguf_kinds import KindFiles, write_kind
from tests.fixtures.tiny import make_checkpoint, picture, reference
from tests.fixtures.tiny_any import make_any

HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "mistral3": ("mistral", {}),
    "mistral3 far": ("ministral3", {}),
    "glm4": ("glm4", {}),
    "glm4 with a share turned": ("glm4", {"rope_parameters": HALF}),
    "glm4moe": ("glm4_moe", {}),
    "glm4moe with norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "phi3": ("phi3_near", {}),
    "phi3, long": ("phi3_short", {}),
}
SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {"tie": True, "text": {"sliding_window_pattern": 6, "query_pre_attn_scalar": 16}},
    "smolvlm": {},
    "internvl": {},
    "internvl with the larger tower": {"vision": {"use_qk_norm": True, "norm_type": "rms_norm"}},
    "lfm2_vl": {},
    "dots_ocr": {},
    "glm_ocr": {},
    "dots_ocr with biases": {"vision": {"use_bias": True}},
    "dots_ocr without the last norm": {"vision": {"post_norm": False}},
    "minicpmv4_6": {},
    "gemma4 as E2B": {"tie": True, "text": E2B},
    "gemma4 as 31B": {"text": LARGE},
    "gemma4 as 26B-A4B": {"tie": True, "text": LARGE | EXPERTS},
    "gemma4 plain": {"text": LARGE, "vision": {"use_clipped_linears": False, "standardize": False}},
}
UNTOLD, PROCESSOR = ("gemma4", "lfm2_vl", "minicpmv4_6"), "preprocessor_config.json"
"""Families whose files say nothing of budgets and tiles. Published models' are too large here."""
SIZES = [(150, 97), (200, 333)]
LOGITS: dict[str, Any] = {"atol": 3e-4, "rtol": 0.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def greedy(folder: Path, tokens: list[int], images: list[Any], count: int) -> list[int]:
    session = Session(load(folder), tokens, images, page_size=16)
    answer = [int(session.prefill()[-1].argmax())]
    while len(answer) < count:
        answer.append(int(session.decode(answer[-1]).argmax()))
    return answer


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_answered_as_by_transformers(tmp_path: Path, name: str, kind: str) -> None:
    made, text = TEXTS[name]
    files = write_kind(make_any(tmp_path / "made", made, **text), tmp_path / "out", Kind[kind])
    config = json.loads((files.rounded / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0])
    theirs = model.from_pretrained(files.rounded, dtype=torch.float32).eval()
    tokens = list(range(11, 60))
    folder = write_folder([files.model], None)
    assert not load_spec(folder).sees_images
    session = Session(load(folder), tokens, [], page_size=None)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(session.prefill(), expected, **LOGITS)
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        answer = theirs.generate(torch.tensor([tokens]), pad_token_id=0, **settings)
    assert greedy(folder, tokens, [], 8) == answer[0, len(tokens) :].tolist()


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", SEEING)
def test_images_are_answered_about_as_by_transformers(tmp_path: Path, name: str, kind: str) -> None:
    family = name.split()[0]
    made = make_checkpoint(tmp_path / "made", family, **SEEING[name])
    files = write_kind(made, tmp_path / "out", Kind[kind])
    theirs = reference(files.rounded)
    images = [theirs.resize(picture(*size, seed=at)) for at, size in enumerate(SIZES)]
    tokenizer = Tokenizer.from_file(str(files.rounded / "tokenizer.json"))
    shown = [token for _ in images for token in tokenizer.encode(theirs.placeholder).ids]
    tokens = [11, 12, *shown, 30, 31, 32]
    folder = write_folder([files.model], files.mmproj)
    if family in UNTOLD:
        shutil.copy(files.rounded / PROCESSOR, folder / PROCESSOR)
    session = Session(load(folder), tokens, images, page_size=None)
    expected = theirs.logits(session.tokens, images)
    torch.testing.assert_close(session.prefill(), expected, **LOGITS)
    answer = theirs.generate(session.tokens, images, max_new_tokens=8)
    assert greedy(folder, tokens, images, len(answer)) == answer


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> KindFiles:
    made = make_checkpoint(tmp_path_factory.mktemp("smol") / "made", "smolvlm")
    return write_kind(made, tmp_path_factory.mktemp("out"))


def test_a_towers_language_model_answers_texts_alone(smol: KindFiles) -> None:
    """The file says llama, which transformers' modules compute."""
    assert load_spec(write_folder([smol.model], None)).family == "transformers_any"


def test_files_that_do_not_belong_together_are_refused_by_name(
    smol: KindFiles, tmp_path: Path
) -> None:
    other = write_kind(make_checkpoint(tmp_path / "made", "gemma3", tie=True), tmp_path / "out")
    with pytest.raises(CheckpointError, match="type gemma3 does not belong to llama"):
        write_folder([smol.model], other.mmproj)


def test_what_files_hold_is_what_the_folders_tokenizer_makes(smol: KindFiles) -> None:
    theirs = Tokenizer.from_file(str(smol.rounded / "tokenizer.json"))
    ours = Tokenizer.from_file(str(write_folder([smol.model], None) / "tokenizer.json"))
    for text in ("1234 éàü 日本語 \n\n x", "<image>a <row_1_col_2> b<|im_end|>", "don't  stop"):
        assert ours.encode(text).ids == theirs.encode(text).ids
