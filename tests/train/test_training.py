"""Claims about training: its rendering is the template's, and its lean forward pass is the
library's.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import jinja2
import torch
from PIL import Image

from saccade.demo import MODEL_DIR
from saccade_bench.drawn.draw import SHAPES, draw_shapes_scene, draw_text_scene
from saccade_bench.drawn.tasks import HARDEST, TWO_HOPS, held_out
from train.architecture import build_model
from train.batches import (
    CHARACTERS,
    IMAGE,
    Mix,
    TrainingBatch,
    draw_batch,
    draw_pictures,
    label_cells,
    preprocess,
    smart_resize,
    tokenise,
)
from train.net import encode_pictures, logits, patchify, read_tokens
from train.optimiser import orthogonalise
from train.tokenizer import build_tokenizer
from train.train import HOP, STAGES, Trainer, mix_at

MIX = Mix(HARDEST, 128, 600, 4, (0, 0, 1))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only get into each other's way at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_training_tokens_are_the_chat_templates() -> None:
    template = jinja2.Template((MODEL_DIR / "chat_template.jinja").read_text())
    tokenizer = build_tokenizer()
    for seed in range(30):
        task = held_out("chat", seed)
        messages: list[dict[str, object]] = []
        for turn in task.turns:
            parts = [{"type": "image_url"} for _ in turn.scenes]
            messages.append(
                {"role": "user", "content": [*parts, {"type": "text", "text": turn.question}]}
            )
            messages.append({"role": "assistant", "content": turn.answer})
        pictures = sum(len(turn.scenes) for turn in task.turns)
        row = tokenise(task, [(1, 1)] * pictures)
        assert row.tokens == tokenizer.encode(template.render(messages=messages)).ids


def test_answers_are_what_is_learned() -> None:
    task = held_out("chat", 3)
    pictures = sum(len(turn.scenes) for turn in task.turns)
    row = tokenise(task, [(2, 3)] * pictures)
    for number, turn in enumerate(task.turns):
        learned = [token for _, token, of in row.answers if of == number]
        assert (
            build_tokenizer().decode(learned, skip_special_tokens=False)
            == turn.answer + "<|im_end|>"
        )
    assert all(row.tokens[place + 1] == token for place, token, _ in row.answers)


def library_logits(model: torch.nn.Module, batch: TrainingBatch, row: int) -> torch.Tensor:
    """The library's forward of one conversation, with its own positions."""
    patches, grids = [], []
    for pixels in batch.pixels:
        flat = patchify(pixels[row : row + 1])[0].float() / 127.5 - 1
        patches.append(flat.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(len(flat), -1))
        grids.append([1, pixels.shape[1] // 16, pixels.shape[2] // 16])
    tokens = batch.tokens[row : row + 1, : int(batch.tokens[row].nonzero().max()) + 1]
    out = model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        pixel_values=torch.cat(patches),
        image_grid_thw=torch.tensor(grids),
        mm_token_type_ids=(tokens == IMAGE).int(),
    )
    result: torch.Tensor = out.logits[0]
    return result


@torch.no_grad()
def test_the_lean_forward_is_the_librarys() -> None:
    model = build_model(0).eval()
    batch = draw_batch("test", MIX)
    encoded = [encode_pictures(model, pixels) for pixels in batch.pixels]
    embeddings = torch.cat([cells.flatten(0, 1) for cells, _ in encoded])
    deepstack = [torch.cat([deep[i].flatten(0, 1) for _, deep in encoded]) for i in range(2)]
    hidden = read_tokens(
        model, batch.tokens, batch.positions, batch.picture_rows, embeddings, deepstack
    ).hidden
    ours = logits(model, hidden).unflatten(0, batch.tokens.shape)
    for row in range(len(batch.tokens)):
        theirs = library_logits(model, batch, row)
        torch.testing.assert_close(ours[row, : len(theirs)], theirs, atol=2e-4, rtol=1e-4)


def test_a_batch_is_the_same_for_the_same_seed() -> None:
    one, two = draw_batch("a", MIX), draw_batch("a", MIX)
    assert torch.equal(one.tokens, two.tokens)
    assert all(torch.equal(a, b) for a, b in zip(one.pixels, two.pixels, strict=True))
    assert one.kinds == two.kinds
    assert not torch.equal(one.tokens, draw_batch("b", MIX).tokens)


def test_training_and_held_out_seeds_never_meet() -> None:
    """Both draw from `random.Random(text)`, and the texts begin differently."""
    assert random.Random("held out/number/0").random() != random.Random("train/0/answer/0").random()


def test_the_labels_say_what_stands_in_a_cell() -> None:
    scene = draw_shapes_scene(random.Random(0), [("red", "heart")], (128, 96))
    characters, shapes, colours, centres, _, ranks = label_cells(scene, 3, 4)
    assert characters.max() == 0
    assert centres.sum() == 1
    assert set(shapes[shapes > 0].tolist()) == {1 + SHAPES.index("heart")}
    assert ((shapes > 0) == (colours > 0)).all()
    assert ((shapes > 0) == (ranks == 1)).all()
    scene = draw_text_scene(random.Random(0), "4071", (128, 96), ["default"])
    characters, shapes, _, _, ranks, _ = label_cells(scene, 3, 4)
    assert shapes.max() == 0
    assert set(characters[characters > 0].tolist()) == {
        1 + CHARACTERS.index(char) for char in "4071"
    }
    assert set(ranks[characters == 1 + CHARACTERS.index("7")].tolist()) == {3}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((720, 1280), (704, 1280)),
        ((1440, 2560), (1440, 2560)),
        ((100, 47), (96, 32)),
        ((20, 20), (64, 64)),
    ],
)
def test_smart_resize_is_qwens(size: tuple[int, int], expected: tuple[int, int]) -> None:
    if size == (100, 47):
        expected = (96, 64)  # 96 x 32 px would be below the lower limit
    assert smart_resize(*size) == expected


def test_a_picture_of_any_size_becomes_multiples_of_32() -> None:
    pixels = preprocess(Image.new("L", (301, 77), 128))
    assert pixels.shape == (64, 288, 3)
    assert pixels.dtype == torch.uint8
    assert (pixels == 128).all()


@pytest.mark.first
@pytest.mark.parametrize("stage", (*STAGES, HOP), ids=lambda stage: stage.name)
def test_every_stage_can_draw_its_first_and_last_batch(stage: object) -> None:
    chosen = next(one for one in (*STAGES, HOP) if one is stage)
    for progress in (0.0, 0.999):
        mix = mix_at(chosen, progress)
        if not chosen.pictures:
            pixels, labels = draw_pictures("x", mix)
            assert len(pixels) == len(labels.characters) >= 4
        else:
            batch = draw_batch("x", mix)
            assert len(batch.tokens) >= 4
            assert len(batch.answers) == len(batch.answer_rows) == len(batch.answer_turns)


def test_comparisons_are_drawn_only_on_request_and_for_several_images() -> None:
    assert TWO_HOPS not in draw_batch("a", MIX).kinds
    assert draw_batch("a", replace(MIX, two_hops=1.0)).kinds.count(TWO_HOPS) == 4
    assert TWO_HOPS not in draw_batch("a", replace(MIX, weights=(1.0,), two_hops=1.0)).kinds


def test_the_hop_stage_leaves_the_vision_encoder_as_it_is(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 0, MODEL_DIR, torch.float32)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    stage = replace(HOP, patches=400, rows=4)
    trainer._loss(stage, (draw_batch("a", mix_at(stage, 0.0)), None), 0.0).backward()
    trainer.optimiser.gather(1.0)
    trainer.optimiser.step(1e-3)
    now = trainer.model.state_dict()
    changed = {name for name in before if not now[name].equal(before[name])}
    assert changed
    assert not [name for name in changed if "visual" in name]


def test_newton_schulz_makes_singular_values_about_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 96, 64).bfloat16()).float())
    assert float(values.min()) > 0.5 and float(values.max()) < 1.4
