"""How an embedding's file is called, so that the engine can look whether one is there and the
worker that writes it agrees. Knows nothing of what is in it.
"""

from __future__ import annotations

from hashlib import blake2b

from saccade.core.types import ImageKey

SUFFIX = ".safetensors"


def file_name(key: ImageKey) -> str:
    """By digest, settings and salt; the folder it lies in is the model's."""
    name = blake2b(key.digest + key.settings + key.salt.encode(), digest_size=20)
    return name.hexdigest() + SUFFIX
