"""Advice for requests to unknown paths, which may belong to other APIs or servers.

`edge/refusal.py` builds the error responses.
"""

from __future__ import annotations

from collections.abc import Set

_HERE = (
    "this server answers questions about images and text with one language model: POST "
    "/v1/chat/completions, /v1/responses or /v1/completions (GET /openapi.json describes them)"
)
_ABSENT = {
    "/v1/audio": "audio is not supported",
    "/v1/images": "image generation is not supported",
    "/v1/videos": "video generation is not supported",
    "/v1/moderations": "moderation is not supported",
    "/v1/uploads": "multipart uploads are not supported: use /v1/files",
    "/v1/fine_tuning": "fine-tuning is not supported",
    "/v1/vector_stores": "vector stores are not supported",
    "/v1/conversations": "use previous_response_id to continue a conversation",
    "/v1/assistants": "assistants are not supported",
    "/v1/threads": "threads are not supported",
    "/v1/realtime": "realtime sessions are not supported",
    "/v1/messages/batches": "use POST /v1/batches, which accepts Messages requests",
}
"""Paths of OpenAI's and Anthropic's APIs that this server does not implement."""
_FOR_PEOPLE = {"/": "the web UI", "/docs": "the API reference"}
_BASE = "the base URL of OpenAI's clients is this server's address with /v1 at its end"
_ROOTLESS = ("/chat", "/completions", "/responses", "/models", "/files", "/embeddings")
"""Paths that a client of OpenAI's API requests if its base URL lacks /v1."""


def advice(path: str) -> str:
    """Return advice to append to an error about an unknown path, or "" if there is none."""
    for begin, what in _ABSENT.items():
        if _is_below(path, begin):
            return f": {what}; {_HERE}"
    if _is_below(path, "/v1/v1"):
        return (
            ": the base URL contains /v1 twice: it must end with /v1 for OpenAI's clients, and "
            "without it for Anthropic's"
        )
    if any(_is_below(path, begin) for begin in _ROOTLESS):
        return f": {_BASE}"
    if _is_below(path, "/messages"):
        return ": the base URL of Anthropic's clients is this server's address without a path"
    if _is_below(path, "/api"):
        return f": this is not an Ollama server: set the client to OpenAI's API; {_BASE}"
    if _is_below(path, "/v1beta") or ":generateContent" in path or ":streamGenerate" in path:
        return f": this server does not support Gemini's API: set the client to OpenAI's; {_BASE}"
    return ""


def overview(routes: Set[str]) -> str:
    """Return a hint that lists the pages for people among `routes`, or "" if there are none."""
    there = [f"{what} at {path}" for path, what in _FOR_PEOPLE.items() if path in routes]
    return f"; there is {' and '.join(there)}" if there else ""


def _is_below(path: str, begin: str) -> bool:
    return path == begin or path.startswith(f"{begin}/")
