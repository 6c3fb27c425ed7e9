"""Answers with and without guesses, or cached, batched and cold ones, compared token for token, on
random checkpoints.

    python -m tests.same_answers [--caches] [--seconds 240] [--answers 100000] [--seed 0]
        [--only NAME]

Each round makes a checkpoint of one family and one form of weights (float32, int8, int4, int8 on
two ranks), and asks for answers: greedy and drawn, under grammars and the grammars of tool calls,
with penalties, bias, least lengths, end tokens, log-probabilities, rules that look at earlier
tokens, several of one prompt, with and without images; through chunks, prefix hits, few slots,
preemptions, one or two plans in flight. Then it asks again with guesses: those that a server makes,
right ones, wrong ones, and a mixture, each worth a row whatever it costs. Tokens, ends, errors and
log-probabilities' tokens must be equal. Ends by itself; the last line says how many of how many
were.

With --caches, each round asks chats of a bfloat16 or int8 checkpoint cold: one request at a time,
nothing cached. Then it asks them again where earlier rounds are cached, where all but the last page
is, side by side, in small chunks, and with too few pages for all. Tokens and the bits of their
log-probabilities must be equal.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from saccade.core.config import KVConfig
from saccade.core.token_rules import NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import Caching, Request
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.plugins.drafts.drafter import Drafter, Speculation
from saccade.plugins.grammar.grammars import Grammars
from saccade.plugins.grammar.matchers import Matchers
from saccade.plugins.grammar.vocabulary import read_lexicon
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.sched.sequence import Sequence
from saccade.text.grammar.constraint import OutputConstraint
from saccade_bench.lab.checkpoint import make_checkpoint as make_preset
from saccade_bench.lab.presets import PRESETS
from tests.fixtures.harness import Harness, Outcome, set_threads
from tests.fixtures.rank_group import ThreadRankGroup
from tests.fixtures.tiny import SPECIAL, make_checkpoint, picture, reference

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "qwen3_5",
    "qwen3_5_moe",
)
"""The last two keep a state per sequence, and have heads that draft."""
HEADED, HEAD = FAMILIES[-2:], ("mtp=on",)
INT8: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": "int8"}
FORMS: Mapping[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": INT8,
    "int4": {"dtype": torch.bfloat16, "quantization": "int4"},
    "int8 tp 2": INT8,
}
RANKS = {"int8 tp 2": 2}
TEXTS = (
    "the quick brown fox jumps over the lazy dog; the quick brown fox jumps over",
    "look: @ how many red circles are there? look: @ how many red circles",
    "one two one two one two one two one two one two",
    "@ describe",
)
FORMATS = (
    OutputConstraint("json", {"type": "array", "items": {"enum": ["one", 2, None]}}, "x"),
    OutputConstraint(
        "json",
        {
            "type": "object",
            "properties": {"name": {"const": "look"}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
        },
        "x",
    ),
    OutputConstraint("regex", "(one two |red ){5,90}", "x"),
    OutputConstraint("choice", ["red circles", "red", "lazy dog"], "x"),
)
RULES = (
    TokenRules(no_repeat=NoRepeat(3, prompt=False)),
    TokenRules(bad_words=((7, 9), (11,))),
    TokenRules(allowed=tuple(range(5, 60))),
    TokenRules(thinking=ThinkingBudget(4, 20, 21, True)),
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.05},
    {"logprobs": 2},
    {"logit_bias": ((7, 3.0), (9, -4.0)), "min_tokens": 9},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "temperature": 0.7},
    {"stop_token_ids": tuple(range(30, 50)), "min_tokens": 3},
    {"ignore_eos": False, "temperature": 1.0},
    {"prompt_logprobs": 1, "temperature": 0.5},
)
LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"prefix_cache": False},
    {"chunk_tokens": 16},
    {"page_size": 2, "kv_pages": 260},
    {"max_running": 10},
)
EVEN = 2
"""Of these, the first so many, with two plans in flight, as a server has, cut prompts in the same
chunks with and without guesses: in bfloat16 others round otherwise, whatever is guessed.
"""
PROMPTS = 12
"""Of a round, each asked `CHOICES` times."""
CHOICES = 3
MOST = 6
"""Guesses of a sequence in a step."""
CACHED: tuple[tuple[str, str], ...] = (
    ("qwen3_vl", "bfloat16"),
    ("qwen2_5_vl", "bfloat16"),
    ("smolvlm", "bfloat16"),
    ("internvl", "bfloat16"),
    ("small-qwen3-vl", "bfloat16"),
    ("small-qwen2.5-vl", "bfloat16"),
    ("wide-qwen3.5", "bfloat16"),
    ("wide-qwen3.5", "int8"),
    ("minicpmv4_7", "bfloat16"),
    ("lfm2_vl", "bfloat16"),
)
"""Families or presets, and forms. Presets have matrices wide enough for libraries to cut their
sums. The last four keep a state per sequence.
"""
CHATS, ROUNDS = 6, 3
PICTURES = ((112, 140), (84, 56), (56, 196))
"""Heights and widths of pictures before they are resized."""
CIRCUMSTANCES: Mapping[str, dict[str, Any]] = {
    "side by side": {},
    "small chunks": {"chunk_tokens": 21},
    "few pages": {"page_size": 2},
}
"""Limits of servers that are asked all chats' next rounds at once. Few pages hold the longest."""


class Guesser(Drafter):
    """Guesses beside any number of rows: what a server would (`accuracy` None), or each token of
    the known answer, right so likely as `accuracy`.
    """

    def __init__(
        self, answers: Mapping[str, Outcome], accuracy: float | None, seed: int, vocab: int
    ) -> None:
        super().__init__(MOST)
        self._known, self._accuracy, self._vocab = answers, accuracy, vocab
        self._rng = random.Random(seed)

    def _worthwhile(self, speculation: Speculation, most: int, rows: int) -> int:
        del speculation, rows
        return most

    def propose(
        self, sequence: Sequence, speculation: Speculation, budget: int, rows: int
    ) -> list[int]:
        grammar_state = sequence.grammar_state
        if self._accuracy is None:
            return super().propose(sequence, speculation, budget, rows)
        if (
            budget <= 0
            or not self.allows(sequence.request)
            or (grammar_state and not grammar_state.foresees)
        ):
            return []
        first = sequence.length - sequence.prompt_length
        right = self._known[sequence.request.id].tokens[first:]
        return [
            token if self._rng.random() < self._accuracy else self._rng.randrange(self._vocab)
            for token in right[: self._rng.randrange(min(budget, self.most) + 1)]
        ]


@dataclass(frozen=True)
class Model:
    """A random checkpoint, its words, and grammars in them. kv: how keys and values are kept."""

    net: FamilyNet
    rank_group: ThreadRankGroup | None
    tokenizer: Tokenizer
    placeholder: str
    resize: Callable[[Any], Any]
    dtype: str
    matchers: Matchers
    grammars: tuple[str, ...]
    kv: KVConfig = field(default_factory=KVConfig)

    @classmethod
    def make(cls, folder: Path, family: Any, form: str) -> Model:
        if family in PRESETS:
            make_preset(family, folder)
        else:
            make_checkpoint(folder, family)
        options = HEAD if family in HEADED else ()
        spec, theirs, how = load_spec(folder, options), reference(folder), FORMS[form]
        rank_group = None
        if ranks := RANKS.get(form):
            rank_group = ThreadRankGroup(folder, ranks, "data", family_option=options, **how)
        net = (
            rank_group.nets[0]
            if rank_group
            else load_net(spec, folder, device=torch.device("cpu"), **how)
        )
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        lexicon = read_lexicon(tokenizer.to_str(), spec.vocab_size, spec.eos_token_ids)
        grammars = Grammars(lexicon, spec.vocab_size)
        return cls(
            net,
            rank_group,
            tokenizer,
            theirs.placeholder,
            theirs.resize,
            "float32" if form == "float32" else "bfloat16",
            Matchers(lexicon, spec.vocab_size, spec.eos_token_ids),
            tuple(grammars.compile(each).text for each in FORMATS),
        )

    def harness(self, drafts: int, limits: dict[str, Any]) -> Harness:
        harness = Harness(
            self.net,
            self.rank_group,
            drafts=drafts,
            **{"dtype": self.dtype, "kv": self.kv, "max_running": 40, **limits},
        )
        harness.matchers = self.matchers
        return harness

    def requests(self, harness: Harness, seed: int) -> list[Request]:
        rng, found = random.Random(seed), list[Request]()
        pixels = self.resize(picture(112, 140))
        for index in range(PROMPTS):
            text = rng.choice(TEXTS)
            tokens = self.tokenizer.encode(text.replace("@", self.placeholder)).ids
            images = [harness.image(pixels, f"{text}") for _ in range(text.count("@"))]
            sampling = {"max_tokens": rng.randrange(8, 48), **rng.choice(SAMPLINGS)}
            held = rng.random()
            grammar = rng.choice(self.grammars) if held < 0.3 else ""
            rules = rng.choice(RULES) if 0.25 < held < 0.5 else TokenRules()
            expected = self.tokenizer.encode(rng.choice(TEXTS[::2])).ids
            caching = Caching(prediction=tuple(expected) if rng.random() < 0.3 else ())
            for choice in range(CHOICES):
                request = harness.request(
                    f"{index}.{choice}", tokens, images, seed=seed + choice, **sampling
                )
                request = replace(request, grammar=grammar, rules=rules, caching=caching)
                found.append(request)
        return found

    def answers(self, harness: Harness, seed: int, depth: int) -> Mapping[str, Outcome]:
        requests = self.requests(harness, seed)
        half = len(requests) // 2  # the second half finds the first one's prefixes and answers
        first = harness.run(requests[:half], depth=depth)
        return {**first, **harness.run(requests[half:], depth=depth)}


def told(outcome: Outcome) -> object:
    logprobs = [each.token for each in outcome.logprobs]
    return outcome.tokens, outcome.finish, outcome.error, logprobs, len(outcome.scores)


@dataclass(frozen=True)
class Question:
    """A round of a chat: its tokens, with a placeholder for each picture, and pictures' names."""

    id: str
    tokens: list[int]
    pictures: list[str]
    max_tokens: int

    def ask(self, harness: Harness, pixels: Mapping[str, Any]) -> Request:
        images = [harness.image(pixels[name.split()[0]], name) for name in self.pictures]
        wanted = {"max_tokens": self.max_tokens, "logprobs": 1}
        return harness.request(self.id, self.tokens, images, **wanted)


class Chats:
    """Chats with pictures, and their cold answers."""

    def __init__(self, model: Model, seed: int, pixels: Mapping[str, Any]) -> None:
        self._pixels = pixels
        self.rounds: list[list[Question]] = [[] for _ in range(ROUNDS)]
        self.cold: dict[str, Outcome] = {}
        self.longest = 0
        rng, encode = random.Random(seed), model.tokenizer.encode
        special = set(encode("".join(SPECIAL) + model.placeholder).ids)
        harness = model.harness(0, {"prefix_cache": False})
        for chat in range(CHATS):
            tokens, pictures = list[int](), list[str]()
            for number, asked in enumerate(self.rounds):
                text = rng.choice(TEXTS)[: rng.randrange(8, 80)]
                tokens = tokens + encode(text.replace("@", model.placeholder)).ids
                # Some chats show pictures that other chats show, too.
                pictures = pictures + [
                    f"{rng.choice(list(pixels))} {rng.randrange(4)}" for _ in range(text.count("@"))
                ]
                most = rng.randrange(2, 28)
                asked.append(Question(f"{chat}.{number}", tokens, pictures, most))
                answer = self.ask(harness, asked[-1:])[asked[-1].id]
                length = len(asked[-1].ask(harness, pixels).tokens) + most
                self.longest = max(self.longest, length)
                harness.scheduler.flush(embeddings=True)
                self.cold[asked[-1].id] = answer
                tokens = tokens + [each for each in answer.tokens if each not in special]

    def ask(self, harness: Harness, questions: list[Question]) -> Mapping[str, Outcome]:
        return harness.run([each.ask(harness, self._pixels) for each in questions])

    def compare(self, found: Mapping[str, Outcome], name: str) -> Tally:
        """Compare answers with the cold ones to the bit."""
        tally = Tally()
        for id, outcome in found.items():
            cold = self.cold[id]
            bits = [each.logprob for each in outcome.logprobs]
            tally.compared += 1
            tally.cached += outcome.cached_tokens
            if told(outcome) == told(cold) and bits == [each.logprob for each in cold.logprobs]:
                tally.equal += 1
                continue
            print(f"DIFFERS {name} {id} after {outcome.cached_tokens} cached tokens")
            print(f"  cold {told(cold)}\n  then {told(outcome)}", flush=True)
        return tally


def compare_cached(model: Model, seed: int, name: str) -> Tally:
    """Ask a round of chats cold, then in other circumstances, and compare the answers."""
    pixels = {f"{h}x{w}": model.resize(picture(h, w)) for h, w in PICTURES}
    chats, name = Chats(model, seed, pixels), f"{name} seed={seed}"
    whole, harness = Tally(), model.harness(0, {"page_size": random.Random(seed).choice((4, 16))})
    for times in ("earlier rounds cached", "all cached"):
        for questions in chats.rounds:
            for question in questions:
                whole.add(chats.compare(chats.ask(harness, [question]), f"{name} {times}"))
    for circumstance, limits in CIRCUMSTANCES.items():
        few = {"kv_pages": 3 + chats.longest // 2} if "page_size" in limits else {}
        harness = model.harness(0, {**limits, **few})
        for questions in chats.rounds:
            whole.add(chats.compare(chats.ask(harness, questions), f"{name} {circumstance}"))
        whole.preempted += harness.scheduler.counts.preemptions
    return whole


@dataclass
class Tally:
    """Answers compared so far."""

    equal: int = 0
    compared: int = 0
    proposed: int = 0
    accepted: int = 0
    preempted: int = 0
    cached: int = 0

    def add(self, other: Tally) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.compared} answers equal; {self.accepted} of {self.proposed} "
            f"guesses right; {self.preempted} preemptions; {self.cached} tokens cached"
        )


def compare(model: Model, seed: int, name: str) -> Tally:
    """Ask a round without guesses, then with guesses of each kind, and compare the answers."""
    rng, tally = random.Random(seed), Tally()
    exact = model.dtype == "float32"
    limits, depth = rng.choice(LIMITS[: None if exact else EVEN]), rng.choice((1, 2)[not exact :])
    plain = model.answers(model.harness(0, limits), seed, depth)
    for accuracy in (None, 1.0, 0.7, 0.0):
        harness = model.harness(MOST, limits)
        guesser = Guesser(plain, accuracy, seed, model.net.spec.vocab_size)
        guesser.head = model.net.head is not None
        harness.drafter = guesser
        found = model.answers(harness, seed, depth)
        for id, outcome in found.items():
            tally.compared += 1
            if told(outcome) == told(plain[id]):
                tally.equal += 1
            else:
                print(f"DIFFERS {name} seed={seed} {limits} depth={depth} {accuracy=} {id}")
                print(f"  without {told(plain[id])}\n  with    {told(outcome)}", flush=True)
        tally.proposed += guesser.proposed.total()
        tally.accepted += guesser.accepted.total()
        tally.preempted += harness.scheduler.counts.preemptions
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caches", action="store_true", help="cached answers beside cold ones")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="of FAMILY FORM, those that hold this")
    args = parser.parse_args()
    set_threads()
    end = time.monotonic() + args.seconds
    names = [(family, form) for form in FORMS if form != "bfloat16" for family in FAMILIES]
    if args.caches:
        names = [*CACHED]
    names = [each for each in names if args.only in " ".join(each)]
    tallies = {name: Tally() for name in names}
    models: dict[tuple[str, str], Model] = {}
    whole, seed = Tally(), args.seed
    with tempfile.TemporaryDirectory() as folder:
        while whole.compared < args.answers and time.monotonic() < end:
            name = names[seed % len(names)]
            if name not in models:
                models[name] = Model.make(Path(folder) / "-".join(name), *name)
            tally = (compare_cached if args.caches else compare)(models[name], seed, " ".join(name))
            tallies[name].add(tally)
            whole.add(tally)
            seed += 1
    for (family, form), tally in tallies.items():
        print(f"{family:14} {form:9} {tally}")
    print(f"seeds {args.seed} to {seed - 1}: {whole}")
    sys.exit(whole.equal != whole.compared)


if __name__ == "__main__":
    main()
