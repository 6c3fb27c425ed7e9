"""Compares the inputs that a decoder gets in the model's own forward pass with those in Saccade's.

The code is the same for all models and prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The relative tolerance for two computations of the same values."""
LOGITS = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.06}
"""The relative tolerance for the logits of one token. It exceeds `ROUNDING`, because rounding may
send a token to other experts.
"""
EMBEDDINGS, POSITIONS, MASK = "inputs_embeds", "position_ids", "attention_mask"
NEUTRAL = frozenset(
    {
        *("past_key_values", "use_cache", "cache_position", "paged", "input_ids", "labels"),
        *("return_dict", "output_attentions", "output_hidden_states", "logits_to_keep"),
        "num_items_in_batch",
    }
)
"""Arguments that control computation and caching, and do not affect the values."""


@dataclass(frozen=True, slots=True)
class Handed:
    """The arguments and result of one call to a decoder.

    If the decoder was called with token IDs and its embeddings depend only on these, `arguments`
    include the embeddings.
    """

    arguments: Mapping[str, Any]  # by name, without neutral ones
    states: torch.Tensor | None  # [T, hidden], or None if the layers were not run

    @property
    def embeddings(self) -> torch.Tensor | None:
        """The embeddings [T, hidden], or None if the decoder computes them from IDs and images."""
        made = self.arguments.get(EMBEDDINGS)
        return None if made is None else made[0]


class Enough(Exception):
    """Raised to stop a call before the decoder's layers run."""


class Watch:
    """Records the arguments and result of a decoder's first call, as `Handed`, and the arguments of
    its second call.

    later: the arguments of the second call, which is a decode step of one token.
    """

    def __init__(self, stop: bool, images: Collection[str]) -> None:
        self.arguments: Mapping[str, Any] | None = None
        self.later: Mapping[str, Any] | None = None
        self.states: torch.Tensor | None = None
        self._stop = stop
        self._images = images

    def before(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.later is not None:
            return
        signature = inspect.signature(decoder.forward)
        found = dict(signature.bind_partial(*args, **kwargs).arguments)
        for name, each in signature.parameters.items():
            if each.kind is inspect.Parameter.VAR_KEYWORD:
                found |= found.pop(name, {})
        told = {name: each for name, each in found.items() if _says(name, each)}
        if self.arguments is not None:
            self.later = told
            return
        if EMBEDDINGS not in told and found.get("input_ids") is not None:
            if told.keys() & self._images:
                self.arguments = {n: each for n, each in told.items() if n not in self._images}
                return  # the results of its image computation are only visible in its states
            told[EMBEDDINGS] = decoder.get_input_embeddings()(found["input_ids"])
        self.arguments = told
        if self._stop:
            raise Enough

    def behind(self, _decoder: Any, _args: tuple[Any, ...], made: Any) -> None:
        if self.states is None:
            self.states = made[0][0]

    @property
    def handed(self) -> Handed | None:
        """Return the first call, or None if the decoder was not called."""
        return None if self.arguments is None else Handed(self.arguments, self.states)


@contextmanager
def watch(decoder: Any, *, stop: bool = False, images: Collection[str] = ()) -> Iterator[Watch]:
    """Record the decoder's calls within the context.

    stop: skip the decoder's layers if it is called with embeddings.
    images: the names of image tensors.
    """
    watched = Watch(stop, images)
    hooks = (
        decoder.register_forward_pre_hook(watched.before, with_kwargs=True),
        decoder.register_forward_hook(watched.behind),
    )
    try:
        yield watched
    except Enough:
        pass
    finally:
        for each in hooks:
            each.remove()


def find_difference(ours: Handed, theirs: Handed) -> str | None:
    """Return how Saccade's call differs from the model's own, or None if they match."""
    names = sorted(theirs.arguments.keys() - ours.arguments.keys() - {POSITIONS, MASK})
    if names:
        return f"its decoder is called with {', '.join(names)}, which are not supported"
    for name, value in ours.arguments.items():
        own = theirs.arguments.get(name)
        if own is None and (_is_zero(value) or (name == EMBEDDINGS and theirs.states is not None)):
            continue
        if name == POSITIONS:
            if own is not None and not _same_places(value, own):
                return "its decoder gets unknown positions"
        elif not alike(value, own):
            return f"its decoder gets unexpected {name}"
    if not _sees_all(theirs.arguments.get(MASK)):
        return "its decoder gets its own mask, which the KV cache does not support"
    if ours.states is None or theirs.states is None or same_states(ours.states, theirs.states):
        return None
    return "its decoder's output for a prompt differs from Saccade's"


def find_step_difference(ours: Handed, later: Mapping[str, Any]) -> str | None:
    """Return how a decode step differs from the model's own, or None if they match.

    ours: Saccade's call for the prompt followed by the step's token.
    later: the arguments of the model's own step.
    """
    own = later.get(POSITIONS)
    if own is not None and not _same_places(ours.arguments[POSITIONS][..., -1:], own):
        return "its decoder gets an unknown position after the prompt"
    if not _sees_all(later.get(MASK)):
        return "its decoder gets its own mask after the prompt, which the KV cache does not support"
    return None


def _sees_all(mask: Any) -> bool:
    return mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all()))


def same_states(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if most rows of two [T, hidden] differ only by rounding.

    In 16-bit formats, a router may send the remaining rows to other experts.
    """
    if theirs.dtype == torch.float32:
        return alike(ours, theirs)
    apart = (ours.float() - theirs.float()).norm(dim=1) / theirs.float().norm(dim=1)
    return bool(apart.median() <= ROUNDING[theirs.dtype])


def alike(ours: Any, theirs: Any, within: float | None = None) -> bool:
    """Return True if two values differ only by rounding.

    within: the relative tolerance. By default, it is that of the dtype of `theirs`.
    """
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape:
            return False
        if not ours.is_floating_point():
            return torch.equal(ours.long(), theirs.long())
        apart = (ours.float() - theirs.float()).norm()
        share = ROUNDING[theirs.dtype] if within is None else within
        return bool(apart <= share * theirs.float().norm())
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return bool(type(ours) is type(theirs) and ours == theirs)


def differing_rows(ours: torch.Tensor, theirs: torch.Tensor) -> Sequence[int]:
    """Return the indices of rows in which two tensors [T, hidden] differ by more than rounding."""
    apart = (ours.float() - theirs.float()).norm(dim=1)
    many = apart > ROUNDING[theirs.dtype] * theirs.float().norm(dim=1)
    found: list[int] = many.nonzero()[:, 0].tolist()
    return found


def _says(name: str, value: Any) -> bool:
    return name not in NEUTRAL and value is not None and value is not False


def _is_zero(value: Any) -> bool:
    """Return True if all token types are zero, in which case omitting them has the same effect."""
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.any()


def _same_places(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if positions are equal.

    They are [1, T], or [axes, 1, T], where an additional first axis may have the text indices.
    """
    own, other = (each[:, 0] if each.dim() == 3 else each for each in (ours, theirs))
    other = other[len(other) - len(own) :] if len(other) > len(own) > 1 else other
    return own.shape[-1] == other.shape[-1] and bool((own == other).all())
