"""Selects the prompt for reading a page as Markdown: those published for models
(`page_prompts.toml`), or a general one, and the order of text and image.

A model is recognized by its name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import ConfigError

KNOWN: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("page_prompts.toml").read_text(encoding="utf-8")
)
MAX_NGRAM = 256
WINDOW = 90
"""The number of tokens within which n-grams may not repeat, as in DeepSeek-OCR's examples."""
GENERAL = (
    "Convert the page to Markdown. Write all of its text in reading order, tables as HTML and "
    "formulas as LaTeX. Write nothing else."
)


@dataclass(frozen=True, slots=True)
class PagePrompt:
    """The prompt for one page. `fields` are added to the request.

    text_first: whether the text precedes the page, so that all pages share it as a cached prefix.
    """

    prompt: str = GENERAL
    text_first: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)

    def content(self, page: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the content of a message with this page."""
        if not self.prompt:
            return [page]
        text = {"type": "text", "text": self.prompt}
        return [text, page] if self.text_first else [page, text]


def prompt_of(model: str, task: str | None = None) -> PagePrompt:
    """Return the prompt published for a model of this name, or a general prompt.

    Raises ConfigError for a task that the model was not trained for.
    """
    name = _squeezed(model)
    known = next((told for known, told in KNOWN.items() if _squeezed(known) in name), None)
    if task is not None:
        tasks = known.get("tasks", {}) if known is not None else {}
        known = tasks.get(task)
        if known is None:
            raise ConfigError(
                f"--task {task}: {model} has {', '.join(tasks) or 'no tasks'}; use --prompt TEXT "
                "instead"
            )
    if known is None:
        return PagePrompt()
    return PagePrompt(known["prompt"], False, known.get("fields", {}))


def check_task(task: str | None, prompt: str | None) -> None:
    """Raise ConfigError for an unknown task, and if both a task and a prompt are set."""
    tasks = sorted({each for told in KNOWN.values() for each in told.get("tasks", ())})
    if task is not None and task not in tasks:
        raise ConfigError(f"--task {task} is not supported: use one of {', '.join(tasks)}")
    if task is not None and prompt is not None:
        raise ConfigError(f"--task {task} sets the prompt: omit --prompt")


def _squeezed(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def asked(model: str, prompt: str | None, ngram: int | None, task: str | None = None) -> PagePrompt:
    """Return the model's prompt with the user's options applied. Raises ConfigError.

    ngram: the length of sequences that may not repeat. 0 allows repetition.
    """
    usual = prompt_of(model, task)
    if prompt is not None:
        usual = replace(usual, prompt=prompt)
    if ngram is None:
        return usual
    if not 0 <= ngram <= MAX_NGRAM:
        raise ConfigError(f"--no-repeat-ngram {ngram}: expected 0 to {MAX_NGRAM}")
    fields = {name: value for name, value in usual.fields.items() if name != "vllm_xargs"}
    if ngram:
        rule = usual.fields.get("vllm_xargs", {"window_size": max(WINDOW, ngram)})
        fields["vllm_xargs"] = {**rule, "ngram_size": ngram}
    return replace(usual, fields=fields)
