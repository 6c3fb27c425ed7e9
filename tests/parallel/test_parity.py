"""Several ranks answer as transformers does: greedy, float32, token for token, however heads, weights and pictures are shared."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.config import EncoderMode
from saccade.families.registry import load_spec
from saccade.runtime.weights import load_net
from tests.checkpoints import FAMILIES, FamilyName, make_checkpoint, reference
from tests.engine.harness import Harness, set_threads
from tests.engine.test_parity import CASES, Model, check, reference_answer
from tests.parallel.crew import ThreadCrew

ASKED = ("text", "one picture", "three pictures", "three turns", "the same picture twice")


@pytest.fixture(scope="module", params=[(family, heads) for family in FAMILIES for heads in (1, 2, 4)], ids=lambda p: f"{p[0]}-kv{p[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    set_threads()
    family, kv_heads = request.param
    return load(family, kv_heads, tmp_path_factory.mktemp(family))


@cache
def load(family: FamilyName, kv_heads: int, folder: Path) -> tuple[Path, Model]:
    make_checkpoint(folder, family, text={"num_key_value_heads": kv_heads})
    net = load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    bare = Model(net, Tokenizer.from_file(str(folder / "tokenizer.json")), reference(folder), {})
    return folder, Model(net, bare.tokenizer, bare.reference, {name: reference_answer(bare, CASES[name]) for name in ASKED})


SIZES = [(1, "weights"), (2, "weights"), (2, "data"), (4, "weights"), pytest.param(4, "data", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("size", "encoder"), SIZES)
def test_ranks_answer_as_transformers_cold_warm_and_at_once(case: tuple[Path, Model], size: int, encoder: EncoderMode) -> None:
    folder, model = case
    crew = ThreadCrew(folder, size, encoder)
    harness = Harness(model.net, crew, chunk_tokens=64)
    check(model, harness.run([model.request(harness, name) for name in ASKED]))
    encoded = len(harness.encoded)
    for name in ASKED:
        check(model, harness.run([model.request(harness, name)]))
    assert len(harness.encoded) == encoded, "a seen picture is not encoded again"
