"""Defaults of request fields from a checkpoint's generation_config.json.

`families/unread_fields.py` lists the fields of that file that are ignored. All other unknown fields
are rejected when the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.family import FamilySpec
from saccade.core.token_rules import NO_RULES, NoRepeat, TokenRules
from saccade.core.types import LARGEST, STORED_SAMPLING, SamplingParams
from saccade.families.checkpoint import Section, read_json

OPENAI = SamplingParams(temperature=1.0, max_tokens=LARGEST)
"""The defaults of OpenAI's API. Answers may be as long as the context allows."""


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """The defaults for fields that a request leaves out."""

    sampling: SamplingParams = OPENAI
    # `banned` applies to every answer, `no_repeat` only to requests without such a rule
    rules: TokenRules = NO_RULES


def load_answer_defaults(folder: Path, spec: FamilySpec) -> AnswerDefaults:
    """Read `generation_config.json` if it exists. Raises CheckpointError that names the file."""
    config = read_json(folder / "generation_config.json", required=False)
    try:
        return AnswerDefaults(_sampling(config), _rules(config, spec))
    except InvalidRequest as error:
        raise CheckpointError(f"{config.where}: {error}") from None


def _sampling(config: Section) -> SamplingParams:
    found: dict[str, Any] = {
        name: config.get(theirs) if name == theirs else config.integer(theirs)
        for name, (theirs, _) in STORED_SAMPLING.items()
        if config.has(theirs)
    }
    if config.has("do_sample") and not config.flag("do_sample"):
        found["temperature"] = 0.0
    if config.has("stop_strings"):
        stop = config.get("stop_strings")
        found["stop"] = tuple(stop) if isinstance(stop, list) else (config.text("stop_strings"),)
    return replace(OPENAI, **found)


def _rules(config: Section, spec: FamilySpec) -> TokenRules:
    no_repeat = None
    if size := config.integer("no_repeat_ngram_size", default=0):
        from saccade.front.answer_rules import AnswerRules

        no_repeat = AnswerRules(no_repeat_ngram=NoRepeat(size)).no_repeat_ngram  # may raise
    runs = [[token] for token in config.integers("suppress_tokens", default=())]
    words = config.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(map(_is_run, words)):
        raise CheckpointError(
            f"{config.where}: bad_words_ids must be a list of non-empty lists of integers"
        )
    # Like transformers, never forbid the end tokens.
    runs += [word for word in words if word not in [[token] for token in spec.eos_token_ids]]
    if outside := [token for run in runs for token in run if not 0 <= token < spec.vocab_size]:
        raise CheckpointError(
            f"{config.where}: token {outside[0]} of suppress_tokens or bad_words_ids is not within "
            f"the vocabulary of {spec.vocab_size}"
        )
    return TokenRules(no_repeat=no_repeat, banned=tuple(dict.fromkeys(map(tuple, runs))))


def _is_run(word: object) -> bool:
    return isinstance(word, list) and bool(word) and all(type(token) is int for token in word)
