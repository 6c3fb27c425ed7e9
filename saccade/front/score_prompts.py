"""Prompts for embedding models and rerankers, in the form on which they were trained
(`core.family.ScoreTemplates`).

This module determines which of these tasks a checkpoint supports, and builds the chats that its
chat template renders.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from saccade.core.errors import ConfigError, InvalidRequest
from saccade.core.family import FamilySpec, ScoreTemplates
from saccade.core.settings import Pooling
from saccade.families.checkpoint import PoolingFiles
from saccade.front.conversation import Chat, Message, MessageText, Part
from saccade.front.part_defaults import ImageLimits
from saccade.text.prompt.template import Tokenizer

if TYPE_CHECKING:
    from saccade.front.late_interaction import LateScoring

Task = Literal["embed", "rank", "last", "late"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a server embeds or ranks. `task` is None if it only generates."""

    task: Task | None = None
    templates: ScoreTemplates | None = None
    labels: tuple[int, int] = (0, 0)  # token ids of a reranker's answers, yes and no
    late: LateScoring | None = None  # if the task is "late"

    def check_embeds(self) -> None:
        """Raise InvalidRequest unless the model can embed."""
        if self.task not in ("embed", "last", "late"):
            raise InvalidRequest(
                "this model was not trained to embed: serve a Qwen3-VL-Embedding checkpoint, or "
                "start the server with --pooling last, whose embeddings are not calibrated",
                "model",
                "unsupported_model",
            )

    def check_late(self) -> LateScoring:
        """Return the late interaction prompts. Raises InvalidRequest unless the model returns a
        vector per token.
        """
        if self.late is None:
            raise InvalidRequest(
                "this model was not trained for a vector per token: serve a ColQwen checkpoint",
                "model",
                "unsupported_model",
            )
        return self.late

    def check_single(self, other: str) -> None:
        """Raise InvalidRequest if the model returns a vector per token. other: what the client can
        call instead.
        """
        if self.late is not None:
            raise InvalidRequest(
                f"this model has a vector per token, not one per input: use {other}",
                "model",
                "unsupported_model",
            )

    def check_ranks(self) -> None:
        """Raise InvalidRequest unless the model can rank documents."""
        if self.task not in ("rank", "late"):
            raise InvalidRequest(
                "this model was not trained to rank: serve a Qwen3-VL-Reranker or a ColQwen "
                "checkpoint",
                "model",
                "unsupported_model",
            )

    def described(self) -> tuple[tuple[str, str], ...]:
        """Return a description of the task as (name, value) pairs, for the start-up report."""
        words = {
            "embed": "as the checkpoint was trained to make them",
            "last": "the last state of a model that was not trained for it: not calibrated",
            "rank": "as the checkpoint was trained to give them",
            "late": "a vector per token, and ranks by MaxSim",
        }
        if self.task is None:
            return ()
        return (("ranks" if self.task == "rank" else "embeddings", words[self.task]),)

    @property
    def limits(self) -> ImageLimits:
        """The default size limits of images."""
        own = self.templates
        if own is None or self.task == "last":
            return ImageLimits()
        return ImageLimits(min_pixels=own.min_pixels, max_pixels=own.max_pixels)

    def embed_chat(
        self, content: Sequence[Part], instruction: str | None, query: bool = False
    ) -> Chat:
        """Build the prompt for an input to embed. query: it is a search query."""
        own = self.templates
        if own is None or self.task == "last":
            system = instruction
        else:
            usual = own.query if query else own.instruction
            system = _ended(instruction or "") or usual
            content = content or (MessageText(own.empty),)
        before = (Message("system", (MessageText(system),)),) if system else ()
        return Chat((*before, Message("user", tuple(content))))

    def rank_chat(
        self, query: Sequence[Part], document: Sequence[Part], instruction: str | None
    ) -> Chat:
        """Build a prompt that asks the reranker whether `document` answers `query`."""
        own = self.templates
        assert own is not None, "a ranker has templates"
        instruct, before_query, before_document = own.marks
        empty = (MessageText(own.empty),)
        content = (
            MessageText(instruct + (instruction or own.task)),
            MessageText(before_query),
            *(query or empty),
            MessageText(before_document),
            *(document or empty),
        )
        system = Message("system", (MessageText(own.judge),))
        return Chat((system, Message("user", content)))


CHATS = Scoring()


def _ended(instruction: str) -> str:
    instruction = instruction.strip()
    if instruction and not unicodedata.category(instruction[-1]).startswith("P"):
        return f"{instruction}."
    return instruction


def find_scoring(
    wanted: Pooling, files: PoolingFiles | None, spec: FamilySpec, own: Tokenizer
) -> Scoring:
    """Determine how the model embeds or ranks. Raises ConfigError if it does not support `wanted`.

    files: the checkpoint's pooling configuration.
    own: the checkpoint's tokenizer.
    """
    if (late := spec.templates.late) is not None and wanted != "none":
        if wanted != "auto":
            raise ConfigError(
                f"--pooling {wanted}: this checkpoint was trained for a vector per token: omit the "
                "option"
            )
        from saccade.front.late_interaction import LateScoring

        return Scoring("late", late=LateScoring.load(late, own))
    templates = spec.templates.scores
    task = (files.task if files else None) if wanted == "auto" else wanted
    if task is None or task == "none":
        return CHATS
    if task == "last":
        return Scoring("last")
    if templates is None:
        if wanted == "auto":
            return CHATS
        raise ConfigError(
            f"--pooling {wanted}: no checkpoint of this model's family was trained for it; use "
            "--pooling last"
        )
    least, most = templates.min_pixels, min(templates.max_pixels, spec.pixel_bounds.max_pixels)
    templates = replace(templates, min_pixels=min(least, most), max_pixels=most)
    if task == "embed":
        return Scoring("embed", templates)
    labels = files.labels if files and len(files.labels) == 2 else _labels(templates, own)
    return Scoring("rank", templates, (labels[0], labels[1]))


def _labels(templates: ScoreTemplates, own: Tokenizer) -> tuple[int, ...]:
    found = [own.encode(label) for label in templates.labels]
    if any(len(tokens) != 1 for tokens in found):
        words = " and ".join(map(repr, templates.labels))
        raise ConfigError(
            f"--pooling rank: {words} are not single tokens of this model's tokenizer"
        )
    return tuple(tokens[0] for tokens in found)
