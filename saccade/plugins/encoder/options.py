"""Options for servers that run a part of the model, and for those that run the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from saccade.core.errors import ConfigError
from saccade.core.given_paths import check_given
from saccade.core.settings import RoleSettings
from saccade.core.tuning import named


@dataclass(frozen=True, slots=True)
class RoleOptions(RoleSettings):
    """Which part of the model this server runs, and the servers that run the rest."""

    needs_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        named(self, "encoders")
        for path in self.files:
            if len(self.encoders) > 1:
                raise ConfigError(f"--encoders {path}: set either one file or a list of URLs")
            check_given("--encoders", path)
            if "/" not in path and not Path(path).exists():
                raise ConfigError(f"--encoders {path} must be http://HOST:PORT, or a file (./NAME)")
        if (self.role == "language") != bool(self.encoders):
            raise ConfigError(
                "--role language requires --encoders, and --encoders requires --role language"
            )
