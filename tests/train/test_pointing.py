"""Claims about pointers: each word of an answer that names something points at what it names, and
nowhere else.
"""

import pytest

pytest.importorskip("transformers")

import torch

from saccade_bench.drawn.draw import SHAPES, Scene
from saccade_bench.drawn.tasks import HARDEST, SKILLS, held_out
from train.batches import CHARACTERS, COLOUR_NAMES, Mix, draw_batch
from train.pointing import pointers
from train.tokenizer import build_tokenizer


@pytest.mark.parametrize("skill", SKILLS)
def test_a_pointers_word_is_what_stands_there(skill: str) -> None:
    for seed in range(60):
        seen: list[Scene] = []
        for turn in held_out(skill, seed, ["default"]).turns:
            seen += turn.scenes
            found = pointers(turn, seen)
            assert found
            for pointer in found:
                scene, rest = seen[pointer.picture], turn.answer[pointer.start :]
                if scene.text is not None and pointer.rank:
                    assert rest[0] == scene.text.text[pointer.rank - 1].lower()
                elif turn.kind == "which":
                    assert rest == f"{pointer.picture + 1}."
                elif pointer.rank:
                    shape = sorted(scene.shapes, key=lambda one: one.x)[pointer.rank - 1]
                    assert rest.startswith((shape.colour, shape.kind, shape.colour.capitalize()))
                else:
                    assert rest[0].isdigit()


def test_a_batch_looks_at_the_cells_that_show_the_next_token() -> None:
    batch = draw_batch("point", Mix(HARDEST, 128, 1200, 8, (1.0,)))
    words = [*CHARACTERS, *(f" {word}" for word in (*SHAPES, *COLOUR_NAMES))]
    ids = {build_tokenizer().encode(word).ids[0]: word.strip() for word in words}
    labels = batch.labels[0]
    length = batch.tokens.shape[1]
    checked = 0
    for source, targets in zip(batch.look_from.tolist(), batch.look_at, strict=True):
        b, place = divmod(source, length)
        word = ids[int(batch.tokens[b, place + 1])]
        first = int(batch.picture_rows.view(len(batch.tokens), -1)[b, 0]) - b * length
        cells = targets.nonzero()[:, 0] - first
        assert len(cells)
        shown = {CHARACTERS[c - 1] for c in labels.characters[b, cells].flatten().tolist() if c}
        shown |= {SHAPES[c - 1] for c in labels.shapes[b, cells].flatten().tolist() if c}
        shown |= {COLOUR_NAMES[c - 1] for c in labels.colours[b, cells].flatten().tolist() if c}
        assert word in shown or word.isdigit()
        checked += 1
    assert checked == len(batch.look_from) > 8
    assert torch.equal(batch.look_at.any(0)[:first], torch.zeros(first, dtype=torch.bool))
