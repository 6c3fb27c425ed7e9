"""Saccade serves vision-language models. A repeated image costs only a hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.core.types import SamplingParams

if TYPE_CHECKING:
    from saccade.llm import LLM, Answer
    from saccade.tools.transports import AsyncSendOnce, SendOnce

__version__ = "0.2.0"
__all__ = ["LLM", "Answer", "AsyncSendOnce", "SamplingParams", "SendOnce", "__version__"]


def __getattr__(name: str) -> Any:
    # These import the libraries of a server, so they are loaded when first used.
    if name in ("LLM", "Answer"):
        import saccade.llm

        return getattr(saccade.llm, name)
    if name in ("SendOnce", "AsyncSendOnce"):
        import saccade.tools.transports

        return getattr(saccade.tools.transports, name)
    raise AttributeError(f"module 'saccade' has no attribute {name!r}")
