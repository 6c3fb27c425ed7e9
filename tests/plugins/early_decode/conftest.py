"""Servers, and media paths, for tests of early decodes."""

from tests.media.conftest import media_path, spec

__all__ = ["media_path", "spec"]
