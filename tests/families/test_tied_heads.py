"""A head stored with `tie_word_embeddings: true`: one that differs from the token embedding is
used, as in transformers 5; an equal one is the embedding's own table.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from saccade.core.config import QuantizationMode
from saccade.core.errors import CheckpointError
from saccade.families.registry import family_model, load_spec
from saccade.kernels.matrix import DenseMatrix, Matrix
from saccade.nn.embedding import HEAD
from saccade.nn.family_model import FullNet
from saccade.parallel import UNSHARDED, Shard
from saccade.plugins.gguf.folder import write_folder
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.families.every import EVERY
from tests.families.forwarding import CPU, LOGITS, Session, load, prompt
from tests.fixtures.gguf_files import write_files
from tests.fixtures.tiny import reference, tinies
from tests.helpers.processor import needs_int8
from tests.packing import PACKED, quantise_packed
from tests.quantising import FORMATS, is_projection, quantise

TABLE = "language_model.embed_tokens.weight"
OWN = "differs from its token embedding"
QWEN = "qwen3_vl"


def head(net: object) -> Matrix:
    assert isinstance(net, FullNet)
    found: Matrix = net.text.head.weight  # type: ignore[attr-defined]
    return found


def shares(net: object) -> bool:
    """The head and the embedding are one tensor."""
    assert isinstance(net, FullNet)
    matrix, table = head(net), net.text.embedding.table  # type: ignore[attr-defined]
    return isinstance(matrix, DenseMatrix) and matrix.values.data_ptr() == table.data_ptr()


def flagged(folder: Path, flag: bool | None = True) -> Path:
    """Set the flag at the top of config.json and in each of its sections, or remove it."""
    config = json.loads((folder / "config.json").read_text())
    text = [
        config,
        *(config[name] for name in ("text_config", "language_config") if name in config),
    ]
    for section in text:
        section.pop("tie_word_embeddings", None)
        section.pop("tie_embedding", None)
        if flag is not None:
            section["tie_word_embeddings"] = flag
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor], str, str], object]) -> None:
    """Change the tensors. change: takes them, and the names of the embedding and the head."""
    canonical = family_model(load_spec(folder)).canonical_name
    for path in folder.glob("*.safetensors"):
        tensors = {name: value.clone() for name, value in load_file(path).items()}
        names = {canonical(name): name for name in tensors}
        if names.keys() & {TABLE, HEAD}:
            change(tensors, names.get(TABLE, ""), names.get(HEAD, ""))
            save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(family: str, **options: object) -> Path:
        return Path(shutil.copytree(checkpoint(family, **options), tmp_path / family))

    return copy


@pytest.mark.parametrize("family", [*EVERY, *(n for n, t in tinies().items() if not t.sees)])
def test_another_head_is_used_in_every_family(
    family: str, copied: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """`test_contract.py` compares the same head with the reference's, where no flag is set."""
    folder = copied(family)
    stored = head(load(flagged(folder, flag=False))).dense()
    assert OWN not in caplog.text
    tied = load(flagged(folder))
    assert torch.equal(head(tied).dense(), stored) and not shares(tied)
    assert caplog.text.count(OWN) == 1


@pytest.mark.more
@pytest.mark.parametrize("family", [*EVERY, *(n for n, t in tinies().items() if not t.sees)])
def test_an_equal_head_is_the_embedding_in_every_family(
    family: str, copied: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = flagged(copied(family))
    rewrite(folder, lambda tensors, table, head: tensors.update({head: tensors[table].clone()}))
    assert shares(load(folder))
    assert not [each for each in caplog.records if each.name.startswith("saccade")]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", QWEN, "qwen3_vl_moe", "qwen3_5"])
def test_another_head_answers_as_transformers(family: str, copied: Callable[..., Path]) -> None:
    folder = flagged(copied(family))
    theirs = reference(folder)
    session = Session(load(folder), prompt(theirs, 0), [], page_size=None)
    torch.testing.assert_close(session.prefill(), theirs.logits(session.tokens), **LOGITS)


@pytest.mark.parametrize("row", [0, 300, 599])
def test_one_other_row_in_shards_of_files_is_found(copied: Callable[..., Path], row: int) -> None:
    folder = flagged(copied(QWEN, sharded=True))
    table = head(load(folder)).dense()
    embedding = load(folder).text.embedding.table  # type: ignore[attr-defined]

    def nearly(tensors: dict[str, torch.Tensor], _: str, name: str) -> None:
        if name:
            tensors[name] = embedding.clone()
            tensors[name][row, 5] += 1e-3

    rewrite(folder, nearly)
    found = head(load(folder)).dense()
    assert not torch.equal(found, table)
    assert (found - embedding).count_nonzero(dim=1).nonzero().tolist() == [[row]]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_compares_its_own_rows(copied: Callable[..., Path], rank: int) -> None:
    folder = flagged(copied(QWEN))

    def second_half(tensors: dict[str, torch.Tensor], table: str, name: str) -> None:
        tensors[name] = torch.cat((tensors[table][:300], tensors[name][300:]))

    rewrite(folder, second_half)
    stored = head(load(folder)).dense()
    spec = load_spec(folder)
    net = load_net(spec, folder, dtype=torch.float32, device=CPU, shard=Shard(rank, 2))
    assert torch.equal(head(net).dense(), stored[300 * rank : 300 * (rank + 1)])
    assert shares(net) == (rank == 0)


@needs_int8
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_another_head_is_quantised_as_any(
    copied: Callable[..., Path], mode: QuantizationMode
) -> None:
    folder = copied(QWEN)

    def rows(flag: bool) -> torch.Tensor:
        spec = load_spec(flagged(folder, flag=flag))
        net = load_net(spec, folder, dtype=torch.float32, device=CPU, quantization=mode)
        return net.logits(torch.ones(1, net.hidden))

    assert torch.equal(rows(flag=True), rows(flag=False))


@pytest.mark.parametrize("name", ["gptq", "w8a16 channels"])
def test_a_packed_head_is_used(
    copied: Callable[..., Path], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    format = PACKED[name]
    if "ignore" in format.settings:
        format = replace(format, settings={**format.settings, "ignore": ["re:.*visual.*"]})
    chosen = lambda each: is_projection(each) or each == HEAD  # noqa: E731
    packed, twin = quantise_packed(flagged(copied(QWEN)), format, tmp_path, chosen)
    net = load(packed)
    assert torch.equal(head(net).dense(), head(load(twin)).dense()) and not shares(net)
    assert "are not used by any layer" not in caplog.text


def test_a_head_in_fp8_is_used(copied: Callable[..., Path], tmp_path: Path) -> None:
    format = FORMATS["fp8 blocks"]
    settings = {**format.settings, "modules_to_not_convert": ["model.visual"]}
    chosen = lambda each: is_projection(each) or each == HEAD  # noqa: E731
    stored, twin = quantise(
        flagged(copied(QWEN)), replace(format, settings=settings), tmp_path, chosen
    )
    assert torch.equal(head(load(stored)).dense(), head(load(twin)).dense())


def test_a_head_in_a_gguf_file_is_used(
    gguf_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    files = write_files(gguf_checkpoint(QWEN, False), tmp_path, Kind.F32)
    folder = write_folder([files.model], files.mmproj)
    stored = head(load(folder)).dense()
    made = Path(shutil.copytree(folder, tmp_path / "flagged"))
    assert torch.equal(head(load(flagged(made))).dense(), stored)


@pytest.mark.parametrize("flag", [False, None])
def test_no_head_without_the_flag_is_refused_by_name(
    copied: Callable[..., Path], flag: bool | None
) -> None:
    folder = flagged(copied(QWEN, tie=True), flag=flag)
    with pytest.raises(CheckpointError, match=r"no file has the tensor lm_head\.weight"):
        load(folder)


def test_dummy_weights_are_tied(copied: Callable[..., Path]) -> None:
    folder = flagged(copied("internvl"))
    spec = load_spec(folder)
    net = load_net(
        spec, folder, dtype=torch.float32, device=CPU, load_format="dummy", shard=UNSHARDED
    )
    assert shares(net)
