"""Functions that all clients share: the server's address, the model's name, and error messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from saccade.core.errors import ConfigError
from saccade.core.shown_url import shown_url


def root(base_url: str) -> str:
    """Return the server's address without /v1 at its end. Raises ConfigError if it is not an HTTP
    URL.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--base-url {shown_url(base_url)}: expected http://HOST:PORT or https://HOST, with or "
            "without /v1"
        )
    return base_url.rstrip("/").removesuffix("/v1")


def cause(error: BaseException) -> str:
    """Return why a connection failed, from the innermost cause of an HTTP client's exception."""
    while beneath := error.__cause__ or error.__context__:
        error = beneath
    return (
        "connection refused"
        if isinstance(error, ConnectionRefusedError)
        else str(error) or type(error).__name__
    )


def unreachable(address: str, error: BaseException) -> ConfigError:
    """Return the error for a server that does not respond to the first request."""
    return ConfigError(
        f"cannot connect to {shown_url(address)} ({cause(error)}): is the server running? Set its "
        "address with --base-url"
    )


def said(answer: Any) -> str | None:
    """Return the message in the JSON of an error response, or `None` if it has none."""
    match answer:
        case (
            {"error": {"message": str(text)}}
            | {"error": str(text)}
            | {"message": str(text)}
            | {"detail": str(text)}
        ):
            return text
    return None


def refusal(status: int, body: str) -> str:
    """Return a server's message about an HTTP error. For a 401, it also names the option for the
    key.
    """
    try:
        text = said(json.loads(body))
    except ValueError:
        text = None
    text = text or body.strip()[:500] or f"HTTP {status} without a body"
    return f"{text} (--api-key KEY)" if status == 401 else text


def first_model(address: str, headers: Mapping[str, str], timeout: float) -> str:
    """Return the name of the first model that the server lists at /v1/models. Raises
    ConfigError.
    """
    try:
        reply = httpx.get(f"{address}/v1/models", headers=dict(headers), timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(address, error) from None
    return named_first(address, reply.status_code, reply.text)


def named_first(address: str, status: int, body: str) -> str:
    """Return the first model's name in a response of /v1/models. Raises ConfigError."""
    if status == 401:
        raise ConfigError(f"{shown_url(address)}: {refusal(status, body)}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"{shown_url(address)}/v1/models lists no model (HTTP {status}): "
            f"{refusal(status, body)}; set one with --model"
        ) from None
