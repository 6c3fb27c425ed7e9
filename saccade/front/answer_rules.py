"""Rules for an answer that a client can set in addition to sampling parameters.

They concern forbidden tokens and words, the length of reasoning, how the text ends, truncation of
the prompt, and priority. This module checks them and converts words to tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saccade.core.errors import InvalidRequest
from saccade.core.token_rules import NO_RULES, NoRepeat, ThinkingBudget, TokenRules
from saccade.text.answer.answer_format import THOUGHTS
from saccade.text.prompt.template import Tokenizer

MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_NGRAM = 256
"""If a prompt consists of one repeated token, each of its tokens costs a scan of this length,
once.
"""
MAX_SPARED_TOKENS = 1024
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """A request's rules for its answers, under vLLM's field names.

    The constructor raises InvalidRequest, which names the field, if a rule is invalid.
    """

    allowed_token_ids: tuple[int, ...] = ()
    # texts that the answer must not contain at the start of a word or after a space
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram: NoRepeat | None = None
    thinking_token_budget: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # False: show special tokens by name
    # keep only this many of the last tokens; -1: as many as leave space for the answer
    truncate_prompt_tokens: int | None = None
    priority: int = 0  # among requests of one client; the lowest is served first

    def __post_init__(self) -> None:
        words, rule = self.bad_words, self.no_repeat_ngram
        spared = () if rule is None else rule.spared
        for field, count, most, what in (
            ("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKENS, "tokens"),
            ("bad_words", len(words), MAX_BAD_WORDS, "words"),
            ("vllm_xargs.whitelist_token_ids", len(spared), MAX_SPARED_TOKENS, "tokens"),
        ):
            if count > most:
                raise InvalidRequest(f"{field}: expected at most {most} {what}, got {count}", field)
        if not all(0 < len(word) <= MAX_BAD_WORD_CHARACTERS for word in words):
            raise InvalidRequest(
                f"bad_words: expected words of 1 to {MAX_BAD_WORD_CHARACTERS} characters",
                "bad_words",
            )
        if rule is not None and not (1 <= rule.size <= MAX_NGRAM and rule.window >= 0):
            field = "no_repeat_ngram_size" if rule.prompt else "vllm_xargs.ngram_size"
            raise InvalidRequest(
                f"{field}: expected a whole number from 1 to {MAX_NGRAM}, got {rule.size}", field
            )
        if (self.truncate_prompt_tokens or -1) < -1 or self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: expected at least 1, or -1 for as many tokens as fit, "
                f"got {self.truncate_prompt_tokens}",
                "truncate_prompt_tokens",
            )
        if abs(self.priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority: expected a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}",
                "priority",
            )

    def tokens(self, tokenizer: Tokenizer, begun: bool) -> TokenRules:
        """Convert the rules to token ids. begun: True if the prompt has already opened the
        reasoning.

        Raises InvalidRequest for a bad word that has no tokens.
        """
        thinking = None
        tags = reasoning_tags(tokenizer)
        if self.thinking_token_budget is not None and tags is not None:
            thinking = ThinkingBudget(self.thinking_token_budget, *tags, begun)
        words = [run for word in self.bad_words for run in _spellings(tokenizer, word)]
        rules = TokenRules(
            tuple(dict.fromkeys(self.allowed_token_ids)),
            tuple(dict.fromkeys(words)),
            self.no_repeat_ngram,
            thinking,
        )
        return NO_RULES if rules == NO_RULES else rules

    def named_tokens(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield (field, token ids) for each field in which the client lists tokens."""
        yield "allowed_token_ids", self.allowed_token_ids
        if self.no_repeat_ngram is not None:
            yield "vllm_xargs.whitelist_token_ids", self.no_repeat_ngram.spared


NO_ANSWER_RULES = AnswerRules()


def reasoning_tags(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the ids of the tokens that open and close reasoning, or None if the tokenizer has no
    such tokens.
    """
    for tags in THOUGHTS:
        opened, closed = (tokenizer.backend.token_to_id(tag) for tag in (tags.open, tags.close))
        if opened is not None and closed is not None:
            return opened, closed
    return None


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of a word at the start of a string, and those of the word after a space.

    As in vLLM, the second is left out unless it has the same length and a different first token.
    """
    word = word.lstrip() or word
    plain = tuple(tokenizer.encode(word))
    if not plain:
        raise InvalidRequest(f"bad_words: {word[:100]!r} has no tokens", "bad_words")
    yield plain
    spaced = tokenizer.encode(" " + word)
    if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
        yield tuple(spaced)
