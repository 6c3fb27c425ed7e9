"""Guesses change no answer: greedy and drawn, alone and side by side, with images, cached, in
chunks, preempted; and they are right where an image is asked about again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from saccade.core.config import SnapshotConfig
from saccade.core.plan import Plan
from saccade.core.settings import DraftSettings
from saccade.core.token_rules import NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import Caching, Request
from saccade.engine.process import draft_tokens
from saccade.families.registry import load_spec
from saccade.kernels.processor import has_bf16
from saccade.nn.protocol import FamilyNet
from saccade.plugins.drafts.drafter import Drafter, Speculation
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.vocabulary import read_lexicon
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.worker import Worker
from saccade.sched.sequence import Sequence as Guessed
from saccade.text.grammar.constraint import OutputConstraint
from tests import same_answers
from tests.families.every import EVERY
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import make_checkpoint, picture, reference
from tests.helpers.processor import COMPILED, HAS_BACKEND, INT8, needs_vnni
from tests.same_answers import Guesser

TEXTS = (
    "the quick brown fox jumps over the lazy dog; the quick brown fox jumps over",
    "look: @ how many red circles are there? look: @ how many red circles",
    "one two one two one two one two one two one two",
)
SAMPLINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    "logprobs": {"logprobs": 2},
    "biased": {"logit_bias": ((7, 3.0), (9, -4.0)), "min_tokens": 9},
    "penalised": {"frequency_penalty": 0.5},
    "penalised and drawn": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "temperature": 0.7,
        "seed": 6,
    },
}
RULES: Mapping[str, TokenRules] = {
    "no repeats": TokenRules(no_repeat=NoRepeat(3, prompt=False)),
    "bad words": TokenRules(bad_words=((7, 9), (11,))),
    "allowed": TokenRules(allowed=tuple(range(5, 60))),
    "thinking": TokenRules(thinking=ThinkingBudget(4, 20, 21, True)),
}
GRAMMARS = {
    "json": OutputConstraint("json", {"type": "array", "items": {"enum": ["one", 2, None]}}, "x"),
    "words": OutputConstraint("regex", "(one two |red ){5,90}", "x"),
}
LENGTH = 40
NOTHING: Mapping[str, Outcome] = {}
STATES = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "minicpmv4_6", "minicpmv4_7", "minicpm_ocr")
"""Their tiny checkpoints repeat too little to be guessed from."""


class Told(Drafter):
    """Guesses an answer that is known, or another."""

    def __init__(self, most: int, answer: Sequence[int], *, wrong: bool) -> None:
        super().__init__(most)
        self._answer, self._wrong = answer, wrong

    def propose(
        self, sequence: Guessed, speculation: Speculation, room: int, rows: int
    ) -> list[int]:
        del speculation, rows
        first = sequence.length - sequence.prompt_length
        return [token ^ self._wrong for token in self._answer[first:][: min(room, self.most)]]


class Bold(Drafter):
    """Guesses whatever it finds, beside any number of rows."""

    def _eligible(self, request: Request, rows: int) -> bool:
        del rows
        return self.allows(request)

    def _worthwhile(self, speculation: Speculation, most: int, rows: int) -> int:
        return most


@dataclass(frozen=True)
class Model:
    net: FamilyNet
    tokenizer: Tokenizer
    prompts: tuple[tuple[list[int], list[Any]], ...]

    def requests(self, harness: Harness, name: str, **sampling: Any) -> list[Request]:
        found = []
        for index, (tokens, pixels) in enumerate(self.prompts):
            images = [harness.image(each, f"{index}") for each in pixels]
            found.append(
                harness.request(f"{name}{index}", tokens, images, max_tokens=LENGTH, **sampling)
            )
        return found

    def held(self, harness: Harness) -> list[Request]:
        """Requests under rules that look at earlier tokens, and under grammars: these drawn freely,
        and with penalties, so that forced tokens are drawn too.
        """
        lexicon = read_lexicon(self.tokenizer.to_str(), self.net.spec.vocab_size, self.ends)
        harness.matchers = Matchers(lexicon, self.net.spec.vocab_size, self.ends)
        grammars = Grammars(lexicon, self.net.spec.vocab_size)
        found = [
            replace(request, rules=rules)
            for name, rules in RULES.items()
            for request in self.requests(harness, name, temperature=0.7, seed=3)
        ]
        for name, form in GRAMMARS.items():
            grammar = grammars.compile(form).text
            for more in ({}, {"frequency_penalty": 0.5}, {"logprobs": 1, "min_tokens": 9}):
                sampling: dict[str, Any] = {"temperature": 1.0, "seed": 4, **more}
                requests = self.requests(harness, f"{name} {more}", **sampling)
                found += [replace(request, grammar=grammar) for request in requests]
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        return self.net.spec.eos_token_ids


def load(folder: Path, family: Any, **how: Any) -> Model:
    set_threads()
    make_checkpoint(folder, family)
    spec, theirs = load_spec(folder), reference(folder)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), **how}
    net = load_net(spec, folder, **options)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pixels = theirs.resize(picture(112, 140))
    prompts = tuple(
        (tokenizer.encode(text.replace("@", theirs.placeholder)).ids, [pixels] * text.count("@"))
        for text in TEXTS
    )
    return Model(net, tokenizer, prompts)


def answers(
    model: Model,
    drafts: int,
    known: Mapping[str, Outcome] = NOTHING,
    rank_group: ThreadRankGroup | None = None,
    **limits: Any,
) -> tuple[Mapping[str, Outcome], Harness]:
    """known: answers to guess from, seven in ten tokens right. rank_group: ranks, in place of
    one.
    """
    harness = Harness(model.net, rank_group, drafts=drafts, **{"max_running": 24, **limits})
    vocab = model.net.spec.vocab_size
    if drafts:
        harness.drafter = Guesser(known, 0.7, 1, vocab) if known else Bold(drafts)
    requests = [r for name in SAMPLINGS for r in model.requests(harness, name, **SAMPLINGS[name])]
    return harness.run(requests), harness


def told(outcomes: Mapping[str, Outcome]) -> dict[str, tuple[object, ...]]:
    return {
        name: (each.tokens, each.finish, each.error, [at.token for at in each.logprobs])
        for name, each in outcomes.items()
    }


@pytest.mark.first
@pytest.mark.sparse
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize(
    "limits",
    [{}, {"chunk_tokens": 16}, {"page_size": 2, "kv_pages": 140}, {"max_running": 10}],
    ids=["", "chunks", "preempted", "few slots"],
)
def test_answers_are_those_without_guesses(
    family: Any, limits: dict[str, Any], tmp_path: Path
) -> None:
    model = load(tmp_path, family)
    plain, _ = answers(model, 0, **limits)
    guessed, harness = answers(model, 5, plain if family in STATES else NOTHING, **limits)
    assert told(guessed) == told(plain)
    # Where every slot is full to the end, nobody may guess.
    assert harness.drafter.proposed.total() > 0 or "max_running" in limits
    if "kv_pages" in limits:
        assert harness.scheduler.counts.preemptions > 0


@pytest.mark.more
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kv_pages", [1024, 40])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_answers_held_by_rules_and_grammars_are_those_without_guesses(
    family: Any, kv_pages: int, depth: int, tmp_path: Path
) -> None:
    model = load(tmp_path, family)
    kv_pages -= 12 * (kv_pages == 40 and family in STATES)
    found = []
    known: Mapping[str, Outcome] = {}
    for drafts in (0, 6):
        harness = Harness(model.net, drafts=drafts, kv_pages=kv_pages, max_running=40)
        if drafts:
            guesser = Guesser(known, 0.7, 1, model.net.spec.vocab_size)
            harness.drafter = guesser if family in STATES else Bold(drafts)
        known = harness.run(model.held(harness), depth=depth)
        found.append(told(known))
    assert found[0] == found[1]
    assert harness.drafter.accepted.total() > 0
    assert (harness.scheduler.counts.preemptions > 0) == (kv_pages <= 40)


def test_an_image_asked_about_again_is_answered_in_fewer_steps(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3_vl")
    harness = Harness(model.net, drafts=7)
    tokens, pixels = model.prompts[1]

    def ask(name: str, salt: str = "") -> tuple[list[int], int]:
        images = [harness.image(each, f"{salt}1") for each in pixels]
        request = harness.request(name, tokens, images, max_tokens=LENGTH)
        before = harness.scheduler.counts.steps
        (outcome,) = harness.run([request]).values()
        return outcome.tokens, harness.scheduler.counts.steps - before

    first, slow = ask("first")
    again, fast = ask("again")
    assert again == first and 3 * fast < slow
    right = harness.drafter.accepted
    assert right["image"] >= LENGTH // 2
    # Another tenant's image is another key: nothing of the answer above is guessed for it.
    before = right["image"]
    assert ask("other", "salt")[0] == first and right["image"] == before
    # What is flushed is not guessed from.
    harness.scheduler.flush(embeddings=True)
    before = right["image"]
    assert ask("flushed")[0] == first and right["image"] == before


@pytest.mark.first
@pytest.mark.parametrize("wrong", [0, 1, LENGTH], ids=["right", "one wrong", "wrong"])
def test_an_answer_that_was_predicted_takes_fewer_steps(wrong: int, tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3_vl")
    harness = Harness(model.net, drafts=7)
    tokens = model.prompts[0][0]
    request = harness.request("plain", tokens, max_tokens=LENGTH, temperature=1.5, seed=7)
    (plain,) = harness.run([request]).values()
    before = harness.scheduler.counts.steps
    slow = before
    first = LENGTH // 2 if wrong == 1 else 0
    predicted = [
        (token + (first <= place < first + wrong)) % model.net.spec.vocab_size
        for place, token in enumerate(plain.tokens)
    ]
    caching = Caching(prediction=tuple(predicted))
    (again,) = harness.run([replace(request, id="again", caching=caching)]).values()
    steps = harness.scheduler.counts.steps - before
    assert again.tokens == plain.tokens
    if wrong == LENGTH:
        assert not again.guesses.get("prediction")
    else:
        assert 2 * steps < slow and again.guesses["prediction"] >= LENGTH // 2


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_next_question_goes_on_from_a_state_saved_among_guesses(
    depth: int, tmp_path: Path
) -> None:
    """Of a model with states: guesses end before a snapshot of the answer, or stand behind its
    row; none of them, right or wrong, is part of it.
    """
    model = load(tmp_path, "qwen3_5")
    tokens = model.prompts[2][0]
    words = tuple(range(20, 300))  # no placeholder of an image
    known: dict[str, Outcome] = {}
    sources: list[int] = []
    for drafts in (0, 6):
        harness = Harness(model.net, drafts=drafts)
        drafter = Guesser(known, 0.8, 1, 300)
        if drafts:
            harness.drafter = drafter
        found: dict[str, Outcome] = {}

        def note(plan: Plan) -> None:
            sources.extend(copy.source for copy in plan.snapshot)

        for length in (63, 72, 84):
            sampling: dict[str, Any] = {"max_tokens": length, "temperature": 0.5, "seed": length}
            first = harness.request(f"{length}", [length, *tokens], **sampling)
            first = replace(first, rules=TokenRules(allowed=words))
            found |= harness.run([first], note, depth)
            asked = [length, *tokens, *found[first.id].tokens, 5, 6, 7]
            again = harness.request(f"{length} again", asked)
            found |= harness.run([again], note, depth)
            cached = found[again.id].cached_tokens
            assert cached >= len(tokens) + 20, "nothing of the answer was found again"
        if known:
            assert told(found) == told(known)
            assert [each.cached_tokens for each in found.values()] == [
                each.cached_tokens for each in known.values()
            ]
        known |= found
    assert 0 < drafter.accepted.total() < drafter.proposed.total()
    between = harness.scheduler.limits.drafts.states
    assert between and any(source in between for source in sources)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_a_state_forgets_wrong_guesses(wrong: bool, tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3_5")
    tokens = model.prompts[0][0]
    plain: list[int] = []
    found = []
    for drafts in (0, 4):
        harness = Harness(model.net, drafts=drafts, prefix_cache=False)
        drafter = Told(drafts, plain, wrong=wrong)
        if drafts:
            harness.drafter = drafter
        request = harness.request("", tokens, max_tokens=31)
        (outcome,) = harness.run([request]).values()
        plain = plain or outcome.tokens
        assert outcome.tokens == plain
        guessed, right = drafter.proposed, drafter.accepted
        assert (guessed.total() > 20) == (drafts > 0)
        assert right.total() == (0 if wrong else guessed.total())
        assert isinstance(harness.worker, Worker)
        found.append((harness.worker, harness.steps))
    assert (found[1][1] < found[0][1] / 2) == (not wrong)
    without, drafted = (worker.states for worker, _ in found)
    assert without is not None and drafted is not None
    for layer, states in without.layers.items():
        for name, values in states.items():
            there = drafted.layers[layer][name]
            torch.testing.assert_close(there[0], values[0], rtol=1e-4, atol=1e-5)


def test_no_guess_is_made_where_no_state_can_be_kept(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3_5")
    for between in (0, 1, 3):
        harness = Harness(model.net, drafts=7, snapshots=SnapshotConfig(64, 256, between))
        harness.drafter = Told(7, [5] * LENGTH, wrong=False)
        most = 0

        def note(plan: Plan) -> None:
            nonlocal most
            most = max(most, sum(row.draft for row in plan.rows))

        harness.run(model.requests(harness, "greedy"), note)
        assert most == between


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
@pytest.mark.parametrize("quantization", ["none", INT8])
def test_rows_in_float32_are_not_taken_to_be_exact(
    quantization: Any, family: Any, tmp_path: Path
) -> None:
    """Its products are PyTorch's, whatever the weights are kept as: so a server in float32 guesses
    only if told `speculative=always`.
    """
    model = load(tmp_path, family, quantization=quantization)
    harness = Harness(model.net)
    assert isinstance(harness.worker, Worker) and not harness.worker.batch_invariant
    most, why = draft_tokens(DraftSettings(), harness.config, model.net.spec, batch_invariant=False)
    assert most == 0 and why
    told = DraftSettings("always")
    assert draft_tokens(told, harness.config, model.net.spec, batch_invariant=False) == (7, "")


@pytest.mark.first
@pytest.mark.parametrize("quantization", COMPILED)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_rows_of_compiled_products_are_exact_and_so_are_guesses(
    family: Any, quantization: Any, tmp_path: Path
) -> None:
    model = load(tmp_path, family, dtype=torch.bfloat16, quantization=quantization)
    plain, harness = answers(model, 0, dtype="bfloat16")
    assert isinstance(harness.worker, Worker) and harness.worker.batch_invariant
    known = plain if family in STATES else NOTHING
    guessed, harness = answers(model, 5, known, dtype="bfloat16")
    assert told(guessed) == told(plain)
    assert harness.drafter.proposed.total() > 0


@pytest.mark.more
@needs_vnni
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
def test_rows_of_two_ranks_are_exact_and_so_are_guesses(family: Any, tmp_path: Path) -> None:
    """Sums over ranks are made value by value, in the ranks' order, whatever stands beside."""
    how: Any = {"dtype": torch.bfloat16, "quantization": "int8"}
    model = load(tmp_path, family, **how)
    rank_group = ThreadRankGroup(tmp_path, 2, "data", **how)
    plain, harness = answers(model, 0, rank_group=rank_group, dtype="bfloat16")
    assert [each.batch_invariant for each in harness.worker.workers] == [True, True]  # type: ignore[attr-defined]
    guessed, harness = answers(model, 5, plain, rank_group, dtype="bfloat16")
    assert told(guessed) == told(plain)
    assert harness.drafter.accepted.total() > 0, "guesses are known to be right"


@pytest.mark.more
@needs_vnni
def test_forced_tokens_come_to_the_same_whenever_they_are_foreseen(tmp_path: Path) -> None:
    """While the model's head guesses, no plan is made ahead, so more tokens of a grammar are known
    to be forced: they were one row then, which rounds otherwise, and this seed's answer differed.
    """
    model = same_answers.Model.make(tmp_path, "qwen3_5", "int8 tp 2")
    tally = same_answers.compare(model, 9028, "qwen3_5 int8 tp 2")
    assert tally.equal == tally.compared == 144 and tally.accepted > 100


@pytest.mark.skipif(not has_bf16() or not HAS_BACKEND, reason="PyTorch multiplies bfloat16")
def test_wide_rows_in_bfloat16_are_exact_in_any_company(tmp_path: Path) -> None:
    """oneDNN adds what many inputs come to in another order for other counts of rows."""
    text = {"hidden_size": 512, "num_attention_heads": 32, "intermediate_size": 4096}
    vision = {"out_hidden_size": 512}
    make_checkpoint(tmp_path, "qwen2_5_vl", text=text, vision=vision)
    how: Any = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    harness = Harness(load_net(load_spec(tmp_path), tmp_path, **how), dtype="bfloat16")
    assert isinstance(harness.worker, Worker) and harness.worker.batch_invariant
