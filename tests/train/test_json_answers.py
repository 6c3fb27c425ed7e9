"""Claims about answers that are JSON objects: they are JSON, and their start is not learned."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file

from saccade.demo import MODEL_DIR
from saccade_bench.drawn.tasks import HARDEST, SKILLS, Exchange, held_out
from train.batches import Mix, draw_batch, tokenise
from train.evaluate import read_object
from train.json_answers import AnswerPart, write_object
from train.tokenizer import build_tokenizer
from train.train import QUOTE_SCALE, STAGES, Trainer, mark_tokens, mix_at


def drawn(count: int) -> list[tuple[Exchange, list[AnswerPart]]]:
    written = []
    for seed in range(count):
        task = held_out(SKILLS[seed % len(SKILLS)], seed)
        turn = task.turns[-1]
        written.append((turn, write_object(random.Random(seed), turn, task.turns[0].scenes[-1])))
    return written


def test_answers_are_json_objects_or_hermes_calls_of_them() -> None:
    calls = 0
    for turn, parts in drawn(120):
        text = "".join(part.text for part in parts)
        if text.startswith("<tool_call>"):
            calls += 1
            text = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
            assert set(json.loads(text)) == {"name", "arguments"}
            fields = json.loads(text)["arguments"]
        else:
            fields = json.loads(text)
        assert 1 <= len(fields) <= 3
        for value in fields.values():
            values = value if isinstance(value, list) else [value]
            assert all(str(each).lower() in turn.answer.lower() for each in values)
    assert 10 < calls < 60


def test_the_start_of_an_object_is_never_learned() -> None:
    """Otherwise the model would answer every question with an object."""
    for _, parts in drawn(60):
        assert not parts[0].learned
        assert parts[0].text[0] in "{<"
        assert any(part.learned for part in parts)


def test_a_value_has_the_tokens_of_the_sentence() -> None:
    task = held_out("describe", 3)
    answer = task.turns[0].answer
    parts = [
        AnswerPart('{"answer": "', False),
        AnswerPart(f'{answer}"', True),
        AnswerPart("}", False),
    ]
    row = tokenise(task, [(2, 2)], objects={0: parts})
    tokenizer = build_tokenizer()
    learned = [token for _, token, _ in row.answers]
    assert learned == [*tokenizer.encode(answer).ids, tokenizer.token_to_id('"')]
    end = tokenizer.token_to_id("<|im_end|>")
    assert row.tokens[row.answers[-1][0] + 1 :][1:3] == [tokenizer.token_to_id("}"), end]


def test_batches_without_objects_are_those_of_the_stages_before() -> None:
    mix = Mix(HARDEST, 128, 600, 4, (0, 0, 1))
    assert "json" not in draw_batch("a", mix).kinds
    with_objects = Mix(HARDEST, 128, 600, 4, (0, 0, 1), objects=1.0)
    assert set(draw_batch("a", with_objects).kinds) == {"json"}


def test_only_the_embeddings_of_marks_are_trained(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 0, MODEL_DIR, torch.float32)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    stage = replace(STAGES[-1], patches=400, rows=4)
    trainer._freeze()
    batch = draw_batch("a", mix_at(stage, 0.0))
    trainer._loss(stage, (batch, None), 0.0).backward()
    trainer.optimiser.gather(1.0)
    trainer.optimiser.step(1e-3)
    now = trainer.model.state_dict()
    changed = {name for name in before if not now[name].equal(before[name])}
    words = "model.language_model.embed_tokens.weight"
    assert changed <= {words, "lm_head.weight"}  # the head is tied to the embeddings
    rows = (now[words] != before[words]).any(1)
    assert rows.any()
    assert not (rows & ~mark_tokens()).any()


def test_only_the_quote_changes_on_export(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 0, MODEL_DIR, torch.float32)
    for _ in range(2):
        trainer.export(tmp_path / "model", QUOTE_SCALE)
    given, exported = (
        load_file(folder / "model.safetensors") for folder in (MODEL_DIR, tmp_path / "model")
    )
    changed = {name for name in given if not exported[name].equal(given[name])}
    assert changed == {"model.language_model.embed_tokens.weight"}
    before, now = (
        each["model.language_model.embed_tokens.weight"].float() for each in (given, exported)
    )
    quote = build_tokenizer().token_to_id('"')
    assert (now != before).any(1).nonzero().tolist() == [[quote]]
    torch.testing.assert_close(now[quote], QUOTE_SCALE * before[quote], atol=0.0, rtol=1e-2)


@pytest.mark.parametrize(
    ("text", "string"),
    [
        ('{"answer": "A red star."}', "A red star."),
        ('{"answer": "A red', '{"answer": "A red'),
        ("[7]", "[7]"),
        ('{"text": "A red star."}', '{"text": "A red star."}'),
    ],
)
def test_the_string_of_an_object_is_scored(text: str, string: str) -> None:
    assert read_object(text) == string
