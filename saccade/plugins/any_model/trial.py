"""Compares a model at load with its own implementation.

Prompts are run through the model's own `generate` and through Saccade's computation. The decoder's
inputs and its results must be the same in both. A model that cannot be compared is rejected. The
code is the same for all models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from saccade.core.errors import CheckpointError, StartupError
from saccade.nn.protocol import Batch
from saccade.plugins.any_model.handed import Handed, differing_rows, watch
from saccade.plugins.any_model.processor import TEXT_KEYS
from saccade.plugins.any_model.prompts import (
    ProbePrompt,
    few_sizes,
    image_prompt,
    telling_sizes,
    text_prompt,
)
from saccade.plugins.any_model.refusals import Unservable
from saccade.plugins.any_model.spec import AnySpec

logger = logging.getLogger("saccade")
TEXT = "transformers' generate fails on a text prompt"
IMAGES = "transformers' generate fails on a prompt with an image"
OURS = "Saccade fails on a prompt"


@dataclass(frozen=True, slots=True)
class OwnStep:
    """The decode step after a prompt: its token, the decoder's arguments, and the logits [V] of the
    next token.
    """

    token: int
    arguments: Mapping[str, Any]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A prompt, and the output of the model's own `generate` for it."""

    prompt: ProbePrompt
    handed: Handed
    logits: torch.Tensor | None  # of the next token, [V]
    step: OwnStep | None = None  # the next step, or None if the decoder's layers were not run


@contextmanager
def refusing(spec: AnySpec, what: str) -> Iterator[None]:
    """Convert exceptions in the context to a CheckpointError with the reason why the model is not
    served.

    Startup and memory errors are re-raised unchanged.
    """
    named = f"{spec.folder}: {spec.facts.architecture} is not served:"
    try:
        yield
    except Unservable as error:
        raise CheckpointError(f"{named} {error}") from error
    except (StartupError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers may raise anything
        raise CheckpointError(f"{named} {what}: {type(error).__name__}: {error}") from error


def run_own(model: Any, spec: AnySpec) -> tuple[OwnAnswer, ...]:
    """Run all prompts through the model's own `generate`. Call this before the model is
    modified.
    """
    with refusing(spec, TEXT):
        trials = [_ask(model, text_prompt(spec), stop=False)]
    if spec.sees_images:
        with refusing(spec, IMAGES):
            trials += [
                _ask_several(model, spec),
                _ask(model, image_prompt(spec, few_sizes(spec), model.dtype), stop=False),
            ]
    return tuple(trials)


def _ask_several(model: Any, spec: AnySpec) -> OwnAnswer:
    """Run a prompt with several images. Two of them are adjacent if the model's own code accepts
    that.
    """
    sizes, dtype = telling_sizes(spec), model.dtype
    glued = image_prompt(spec, sizes, dtype)
    try:
        return _ask(model, glued, stop=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers may raise anything
        logger.info("multiple images were not tested: its own generate raises %s", error)
    return _ask(model, image_prompt(spec, sizes, dtype, apart=True), stop=True)


def _ask(model: Any, prompt: ProbePrompt, *, stop: bool) -> OwnAnswer:
    """Run one prompt through the model's own `generate`.

    stop: only record the decoder's arguments, without running its layers.
    """
    settings: Any = transformers.GenerationConfig
    greedy = settings(
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        num_beams=1,  # the checkpoint's settings may override this
        cache_implementation="dynamic",
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    made = None
    inputs = {name: each.to(model.device) for name, each in prompt.inputs.items()}
    images = inputs.keys() - TEXT_KEYS
    with watch(model.get_decoder(), stop=stop, images=images) as watched:
        made = model.generate(**inputs, generation_config=greedy)
    if watched.handed is None:
        raise Unservable("its own generate does not call its decoder")
    if made is None:
        return OwnAnswer(prompt, watched.handed, None)
    if watched.later is None:
        raise Unservable("its own generate does not call its decoder for a second token")
    (first,), (second,) = made.logits
    step = OwnStep(int(made.sequences[0, -2]), watched.later, second)
    return OwnAnswer(prompt, watched.handed, first, step)


def batch_of(prompt: ProbePrompt, rows: torch.Tensor, device: torch.device) -> Batch:
    """Build a batch from one whole prompt, for attention without pages.

    rows: the embeddings of the prompt's images, [S, embedding_width].
    """
    places = [at for span in prompt.spans for at in range(span.start, span.end)]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    few = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return Batch(
        tokens=torch.tensor(prompt.tokens, device=device),
        positions=torch.from_numpy(prompt.positions).to(device),
        out_slots=none,
        slots=none,
        page_table=few,
        q_starts=few[0],
        kv_lengths=few[0],
        singles=0,
        splice_rows=torch.tensor(places, dtype=torch.int64, device=device),
        embeddings=rows,
        sample_rows=none,
    )


def learned_rows(
    trials: Sequence[tuple[OwnAnswer, torch.Tensor]], marks: frozenset[int]
) -> dict[int, torch.Tensor]:
    """Return the learned embeddings [hidden] that a model's own forward pass uses for tokens around
    images.

    trials: the model's answers, each with Saccade's embeddings [T, hidden] of the prompt.
    marks: the IDs of tokens that may have learned embeddings.

    Raises Unservable if the embedding of another token differs, or a marker has several embeddings.
    """
    found: dict[int, torch.Tensor] = {}
    known = [
        (each.prompt.tokens, each.handed.embeddings, ours)
        for each, ours in trials
        if each.handed.embeddings is not None
    ]
    for tokens, theirs, ours in known:
        for place in differing_rows(ours, theirs):
            token, row = tokens[place], theirs[place]
            if token not in marks:
                raise Unservable(
                    f"its decoder gets a different input at token {place} (id {token}) of a "
                    "prompt than Saccade computes"
                )
            if differing_rows(found.setdefault(token, row)[None], row[None]):
                raise Unservable(f"its decoder gets its own inputs instead of token {token}")
    for tokens, theirs, ours in known:
        for place, token in enumerate(tokens):
            if token in found and not differing_rows(ours[place][None], theirs[place][None]):
                raise Unservable(f"its decoder gets two different inputs for token {token}")
    return found
