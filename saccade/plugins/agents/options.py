"""The option for long conversations."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.core.tuning import tuned


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What is computed in advance."""

    prepare_next: bool = tuned(
        True, "Prefill an agent's next prompt while idle, once its trimming pattern is known."
    )
