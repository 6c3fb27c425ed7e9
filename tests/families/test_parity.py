"""The networks compute what transformers computes on the same checkpoint, however the
work is cut up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from saccade.families.qwen_vl.vision import window_order
from saccade.families.registry import load_spec
from saccade.kernels.reference import linear
from saccade.nn.mlp import MLP, GatedMLP
from saccade.parallel import Shard
from saccade.runtime.weights import load_net
from saccade_bench.fixtures.tiny import Reference, picture
from saccade_bench.lab.qwen import qwen
from tests.families.every import EVERY
from tests.families.forwarding import CPU, Session, encode, load

QWEN = [each for each in EVERY if str(each).startswith("qwen")]
LOGITS: dict[str, Any] = {"atol": 2e-4, "rtol": 0.0}
SIZES = [(150, 97), (200, 333), (64, 64)]  # one to be enlarged, odd shapes, partial windows


@pytest.fixture(scope="module", params=EVERY)
def family(request: pytest.FixtureRequest) -> str:
    """Each in turn, tiles too."""
    name: str = request.param
    return name


def prompt(reference: Reference, pictures: int) -> list[int]:
    """Text before, between and after `pictures` placeholders."""
    tokenizer = Tokenizer.from_file(str(reference.folder / "tokenizer.json"))
    tokens = [11, 12, 13]
    for number in range(pictures):
        tokens += [*tokenizer.encode(reference.placeholder).ids, 20 + number]
    return [*tokens, 30, 31, 32, 33]


def pixels(reference: Reference, count: int) -> list[np.ndarray]:
    return [
        reference.resize(picture(*size, seed=number)) for number, size in enumerate(SIZES[:count])
    ]


def test_embeddings_equal_the_reference(family: str, reference: Callable[..., Reference]) -> None:
    ours, theirs = load(reference(family).folder), reference(family)
    packed = pixels(theirs, 3)
    embeddings = encode(ours, [torch.from_numpy(image) for image in packed])
    for mine, expected in zip(embeddings, theirs.embeddings(packed), strict=True):
        assert mine.shape == (expected.shape[0], ours.spec.embedding_width)
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_logits_equal_the_reference(
    family: str, reference: Callable[..., Reference], count: int
) -> None:
    theirs = reference(family)
    images = pixels(theirs, count)
    session = Session(load(theirs.folder), prompt(theirs, count), images, page_size=None)
    torch.testing.assert_close(session.prefill(), theirs.logits(session.tokens, images), **LOGITS)


@pytest.mark.sparse
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_and_decode_equal_one_prefill(
    family: str, reference: Callable[..., Reference], chunk: int, page_size: int | None
) -> None:
    theirs = reference(family)
    images = pixels(theirs, 3)
    session = Session(load(theirs.folder), prompt(theirs, 3), images, page_size)
    answer = [41, 42, 43]
    logits = torch.cat(
        [session.prefill(chunk), torch.stack([session.decode(token) for token in answer])]
    )
    torch.testing.assert_close(logits, theirs.logits([*session.tokens, *answer], images), **LOGITS)


def test_greedy_tokens_equal_generate(family: str, reference: Callable[..., Reference]) -> None:
    theirs = reference(family)
    images = pixels(theirs, 2)
    session = Session(load(theirs.folder), prompt(theirs, 2), images, page_size=16)
    expected = theirs.generate(session.tokens, images, max_new_tokens=12)
    tokens = [int(session.prefill()[-1].argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(session.decode(tokens[-1]).argmax()))
    assert tokens == expected


@pytest.mark.sparse
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "old"},
        {"sharded": True},
        {"tie": True},
        {"layout": "old", "sharded": True, "tie": True},
    ],
)
def test_every_layout_loads(
    family: str, reference: Callable[..., Reference], options: dict[str, object]
) -> None:
    theirs = reference(family, **options)
    images = pixels(theirs, 1)
    session = Session(load(theirs.folder), prompt(theirs, 1), images, page_size=None)
    torch.testing.assert_close(session.prefill(), theirs.logits(session.tokens, images), **LOGITS)


@pytest.mark.parametrize("family", QWEN)
def test_a_picture_is_encoded_alike_alone_and_in_company(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    net = load(checkpoint(family))
    factor = qwen(net.spec).images.factor
    images = [
        torch.from_numpy(picture(h * factor, w * factor, seed=h))
        for h, w in [(2, 3), (7, 5), (2, 3), (4, 9)]
    ]
    together = encode(net, images)
    for image, embedding in zip(images, together, strict=True):
        torch.testing.assert_close(embedding, encode(net, [image])[0], atol=1e-5, rtol=0.0)
        assert embedding.untyped_storage().nbytes() == embedding.nbytes, (
            "an embedding owns its storage"
        )


@pytest.mark.first
@pytest.mark.parametrize("family", QWEN)
def test_a_folded_patch_embedding_is_as_exact(
    family: str, reference: Callable[..., Reference]
) -> None:
    """In float32 it is the reference's but for rounding; in bfloat16 it is no further from it than
    the exact way.
    """
    judge = reference(family)
    pixels = [judge.resize(picture(100, 140, seed=1)), judge.resize(picture(64, 64, seed=2))]
    wanted = torch.cat(judge.embeddings(pixels)).double()
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        for way in ("exact", "folded"):
            net = load_net(
                load_spec(judge.folder, [f"patch_embed={way}"]),
                judge.folder,
                dtype=dtype,
                device=CPU,
            )
            found = torch.cat(encode(net, [torch.from_numpy(each) for each in pixels])).double()
            errors[dtype, way] = float((found - wanted).abs().mean())
    assert errors[torch.float32, "folded"] < 1e-5
    assert errors[torch.bfloat16, "folded"] < 1.2 * errors[torch.bfloat16, "exact"]


def test_windows_of_equal_size_stand_together() -> None:
    order, lengths = window_order((1, 10, 6), merge=2, window=2)
    assert lengths == (16, 16, 8, 8, 8, 4), "two full windows, three half ones, the corner"
    assert sorted(order.tolist()) == list(range(15))
    assert order[:4].tolist() == [0, 1, 3, 4]
    assert order[-1] == 14


@pytest.mark.first
def test_bfloat16_agrees_on_the_first_token(
    family: str, reference: Callable[..., Reference]
) -> None:
    theirs = reference(family)
    net = load_net(load_spec(theirs.folder), theirs.folder, dtype=torch.bfloat16, device=CPU)
    images = pixels(theirs, 1)
    session = Session(net, prompt(theirs, 1), images, page_size=16)
    session.kv = {i: (k.bfloat16(), v.bfloat16()) for i, (k, v) in session.kv.items()}
    assert session.prefill()[-1].argmax() == theirs.logits(session.tokens, images)[-1].argmax()


@pytest.mark.sparse
@pytest.mark.parametrize("ranks", [1, 2])
def test_slices_padded_to_whole_units_change_no_answer(
    family: str,
    reference: Callable[..., Reference],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    """As on a GPU, whose products want that. Experts are cut by their width and never padded."""
    theirs = reference(family)
    folder = theirs.folder
    plain = load(folder)
    monkeypatch.setattr(linear, "PADDED", ("cpu",))
    shard = Shard(0, ranks)
    padded: Any = load_net(load_spec(folder), folder, dtype=torch.float32, device=CPU, shard=shard)
    layers = (*padded.text.layers, *padded.vision.layers)
    mlps: list[Any] = [each.mlp for each in layers if isinstance(each.mlp, MLP | GatedMLP)]
    assert {mlp.down.weight.values.shape[1] % linear.UNIT for mlp in mlps} == {0}
    if ranks > 1:
        return
    assert any(mlp.down.weight.values.shape[1] > 96 for mlp in mlps), (
        "the checkpoint's is 96 or less"
    )
    shown, tokens = pixels(theirs, 1), prompt(theirs, 1)
    expected, found = (Session(net, tokens, shown, 4).prefill() for net in (plain, padded))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
