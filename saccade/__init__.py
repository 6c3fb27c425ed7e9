"""Saccade serves vision-language models; a picture costs its work once, after that it costs a hash."""

from __future__ import annotations

__version__ = "0.1.0"
