"""A checkpoint's sampling for requests that set none. Owns the reading of its file alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from saccade.core.errors import CheckpointError, InvalidRequest
from saccade.core.given_paths import read_text
from saccade.core.types import LARGEST, SamplingParams


def load_sampling_defaults(directory: Path) -> SamplingParams:
    """Read the sampling in `generation_config.json`, over OpenAI's defaults: temperature 1, and
    answers as long as fits.
    """
    path = directory / "generation_config.json"
    try:
        config = json.loads(read_text(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        given["max_tokens"] = config["max_new_tokens"]
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return replace(SamplingParams(temperature=1.0, max_tokens=LARGEST), **given)
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from None
