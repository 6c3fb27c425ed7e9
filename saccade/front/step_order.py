"""The order of the steps that prepare a request, and the condition under which each step applies.

Cheap checks come first. The module of a step is imported at the first request that the step applies
to.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar

from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.options import ServeOptions
from saccade.core.token_rules import NO_RULES
from saccade.front.answer_defaults import AnswerDefaults
from saccade.front.breakpoints import NO_CACHE_REQUEST
from saccade.front.prepared import Preparation
from saccade.front.prompt_encoder import PromptEncoder
from saccade.media.media import Media
from saccade.plugin import Plugin, StepRule
from saccade.text.answer.answer_format import AnswerFormat
from saccade.text.answer.reasoning import Tags
from saccade.text.prompt.template import Tokenizer

log = logging.getLogger("saccade")

S = TypeVar("S")
READABLE = 8
"""A prompt that is to be truncated may have up to this many times the context's tokens."""
Step = Callable[[Preparation], Awaitable[None]]
"""One step of preparing a request, which modifies the `Preparation`. Raises a RequestError that
names the field.
"""
Walk = Literal["answer", "prompt"]
"""answer: prepare a request for an answer. prompt: only process the prompt."""

POINTS = (
    "begin",  # plugins rewrite the request
    "fields",  # checks that need only the fields
    "length",  # the maximum number of tokens to encode
    "text",  # tokenizing the text, which must fit before anything is fetched
    "files",  # files are replaced by their pages or images
    "form",  # grammars
    "media",  # images are opened
    "history",  # the conversation is rewritten, which may depend on its images
    "late form",  # grammars that depend on images
    "edit",  # the conversation is shortened
    "prompt",  # the final prompt, and the values that depend on it
    "limits",  # the maximum length of the answer
)
_STEPS = "saccade.front.steps"
RULES = tuple(
    StepRule(name, after, when and f"{__name__}:{when}", f"{_STEPS}.{step}", answer, read)
    for name, after, when, step, answer, read in (
        ("form.choose", "fields", "is_formed", "form_answer:FormAnswer", "choose", ""),
        ("cache.check", "fields", "is_marked", "keep_prompt:KeepPrompt", "check", "check"),
        ("media.check", "fields", "has_media", "open_sources:OpenSources", "check", ""),
        ("rules.length", "length", "has_rules", "apply_rules:ApplyRules", "set_readable", ""),
        ("text", "text", "", "tokenise:Tokenise", "encode", "read"),
        ("rules.check", "text", "has_rules", "apply_rules:ApplyRules", "check", ""),
        ("files", "files", "has_files", "open_files:OpenFiles", "open", "open_within_reason"),
        ("media.open", "media", "has_media", "open_sources:OpenSources", "open", "open"),
        ("form.complete", "late form", "is_formed_late", "form_answer:FormAnswer", "choose", ""),
        ("prompt", "prompt", "", "tokenise:Tokenise", "widen", ""),
        ("cache.set", "prompt", "is_marked", "keep_prompt:KeepPrompt", "set_breakpoints", ""),
        ("text.ignored", "prompt", "has_switches", "tokenise:Tokenise", "note_ignored", ""),
        ("rules.apply", "prompt", "has_rules", "apply_rules:ApplyRules", "apply", ""),
        ("limits", "limits", "has_other_length", "tokenise:LimitAnswer", "limit", ""),
        ("text.predict", "limits", "has_prediction", "tokenise:Tokenise", "predict", ""),
    )
)


def is_formed(preparation: Preparation) -> bool:
    request = preparation.request
    return request.constraint is not None or request.chat.tools is not None


def is_formed_late(preparation: Preparation) -> bool:
    tools = preparation.request.chat.tools
    return tools is not None and tools.late


def is_held_early(preparation: Preparation) -> bool:
    """Return True if a grammar constrains the answer and does not depend on the request's
    images.
    """
    return preparation.request.held and not is_formed_late(preparation)


def is_held_late(preparation: Preparation) -> bool:
    return preparation.request.held and is_formed_late(preparation)


def is_marked(preparation: Preparation) -> bool:
    asked = preparation.asked
    return bool(asked.chat.marks) or asked.cache != NO_CACHE_REQUEST


def has_media(preparation: Preparation) -> bool:
    return bool(preparation.asked.chat.media)


def has_files(preparation: Preparation) -> bool:
    return bool(preparation.asked.chat.files)


def has_rules(preparation: Preparation) -> bool:
    """Return True if the request or the checkpoint has rules for the answer's tokens."""
    return preparation.asked.rules is not None or preparation.rules != NO_RULES


def has_switches(preparation: Preparation) -> bool:
    return preparation.asked.chat.has_switches


def has_other_length(preparation: Preparation) -> bool:
    """Return True if the prompt may have another length than its tokenized text."""
    longer = preparation.readable != preparation.context_length
    return has_media(preparation) or has_rules(preparation) or longer


def goes_on_with_media(preparation: Preparation) -> bool:
    """Return True for a chat that has images or videos and contains an earlier answer."""
    return has_media(preparation) and preparation.asked.chat.goes_on


def has_prediction(preparation: Preparation) -> bool:
    request = preparation.request
    return bool(request.prediction or request.page_text)


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """The objects from which steps are constructed."""

    spec: FamilySpec
    tokenizer: Tokenizer
    prompts: PromptEncoder
    media: Media
    answer_format: AnswerFormat
    defaults: AnswerDefaults
    tags: Tags  # the tags that enclose reasoning in answers
    options: ServeOptions = ServeOptions()  # noqa: RUF009 - frozen
    model: str = ""  # its name and directory
    can_hold: bool = False  # True if a plugin provides grammars
    _built: dict[Callable[[StepContext], Any], Any] = field(default_factory=dict)

    def step(self, kind: Callable[[StepContext], S]) -> S:
        """Return the instance of a step's class, which is created at first use and shared by all
        requests.
        """
        if kind not in self._built:
            self._built[kind] = kind(self)
        built: S = self._built[kind]
        return built


class StepOrder:
    """All steps in order, including those of plugins."""

    def __init__(self, context: StepContext, plugins: Sequence[Plugin] = ()) -> None:
        """Sort all rules. Raises ConfigError that names the plugin if a rule is invalid."""
        rules = [*RULES, *(rule for plugin in plugins for rule in plugin.requests.steps)]
        self._context = context
        self._rules = [(rule, _condition(rule.when)) for rule in sort_rules(rules)]
        log.debug("steps of a request: %s", ", ".join(rule.name for rule, _ in self._rules))

    def joined(self, preparation: Preparation, walk: Walk) -> Iterator[Step]:
        """Yield the steps that apply to a request. The condition of a step is evaluated after the
        steps before it have run.
        """
        for rule, condition in self._rules:
            method = rule.answer if walk == "answer" else rule.read
            if method and condition(preparation):
                step: Step = getattr(self._context.step(resolve_name(rule.step)), method)
                yield step


def sort_rules(rules: Sequence[StepRule]) -> list[StepRule]:
    """Return the rules in order. Each is after the rule or point that it follows, and before the
    next point.

    Rules that follow the same one keep their relative order. Raises ConfigError for a rule that
    follows an unknown step, or follows itself through others.
    """
    behind: dict[str, list[StepRule]] = {}
    for rule in rules:
        behind.setdefault(rule.after, []).append(rule)

    def follow(name: str) -> Iterator[StepRule]:
        for rule in behind.pop(name, ()):
            yield rule
            yield from follow(rule.name)

    ordered = [rule for point in POINTS for rule in follow(point)]
    for rule in (rule for left in behind.values() for rule in left):
        raise ConfigError(
            f"plugin {rule.name.partition('.')[0]}: its step {rule.name} follows {rule.after}, "
            "which does not exist, or itself follows this step"
        )
    return ordered


def _condition(when: str) -> Callable[[Preparation], bool]:
    if not when:
        return lambda _: True
    if ":" in when:
        found: Callable[[Preparation], bool] = resolve_name(when)
        return found
    return lambda preparation: any(when == each.NAME for each in preparation.asked.extras)
