"""The trial of a model at load.

Prompts go through its own `generate`, and through what is computed here. Both must hand its decoder
the same, and come to the same. What cannot be tried is refused. The same code serves all models.
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
    """The decode step behind a prompt: its token, what the decoder was handed, and the logits [V]
    of the token after it.
    """

    token: int
    arguments: Mapping[str, Any]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A prompt, and what the model's own `generate` made from it."""

    prompt: ProbePrompt
    handed: Handed
    logits: torch.Tensor | None  # the next token's, [V]
    step: OwnStep | None = None  # what follows. None: the decoder's layers were not run.


@contextmanager
def refusing(spec: AnySpec, what: str) -> Iterator[None]:
    """Raise errors within the block as the reason why the model is not served.

    Startup and memory errors pass unchanged.
    """
    named = f"{spec.folder}: {spec.facts.architecture} is not served:"
    try:
        yield
    except Unservable as error:
        raise CheckpointError(f"{named} {error}") from error
    except (StartupError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises what it pleases
        raise CheckpointError(f"{named} {what}: {type(error).__name__}: {error}") from error


def run_own(model: Any, spec: AnySpec) -> tuple[OwnAnswer, ...]:
    """Run all prompts through the model's own `generate`, before anything in it is changed."""
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
    """Ask about several images, two of them side by side if the model's own code takes such."""
    sizes, dtype = telling_sizes(spec), model.dtype
    glued = image_prompt(spec, sizes, dtype)
    try:
        return _ask(model, glued, stop=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises what it pleases
        logger.info("multiple images were not tested: its own generate raises %s", error)
    return _ask(model, image_prompt(spec, sizes, dtype, apart=True), stop=True)


def _ask(model: Any, prompt: ProbePrompt, *, stop: bool) -> OwnAnswer:
    """Run one prompt through the model's own `generate`.

    stop: only look at what the decoder is handed.
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
    """Build a batch from one whole prompt, for an attention without pages.

    rows: its images' embeddings, [S, embedding_width].
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
    """Find the rows [hidden] that a model's own forward puts instead of tokens around an image.

    They are the same for each image. trials: with our embeddings [T, hidden]. marks: the tokens
    that may have them.

    Raises Unservable if another token has its own row, or a mark has several.
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
                    f"its decoder is handed another row at token {place} (id {token}) of a prompt "
                    "than is made here"
                )
            if differing_rows(found.setdefault(token, row)[None], row[None]):
                raise Unservable(f"its decoder is handed rows of its own in place of token {token}")
    for tokens, theirs, ours in known:
        for place, token in enumerate(tokens):
            if token in found and not differing_rows(ours[place][None], theirs[place][None]):
                raise Unservable(f"its decoder is handed two kinds of rows for token {token}")
    return found
