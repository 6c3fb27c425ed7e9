"""`saccade chat --base-url`: ask an OpenAI-compatible server one question, or hold a conversation
with it.

A conversation keeps the history, and prints the cache hits that the server reports. Saccade reports
in which cache it found each image. Other servers report at most the number of cached tokens.
"""

from __future__ import annotations

import base64
import io
import json
import mimetypes
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, UnidentifiedImageError

from saccade.core.errors import ConfigError, SaccadeError
from saccade.core.given_paths import reason, regular, shown
from saccade.core.shown_url import shown_url
from saccade.tools.server import cause, first_model, refusal, root, said, unreachable

TIMEOUT = 600.0
REFUSED = frozenset((400, 413, 415, 422))
"""HTTP statuses of errors that the same request would get again."""
FOUND = {
    "none": "new",
    "kv": "cached: KV",
    "embedding": "cached: embedding",
    "pixels": "cached: pixels",
    "encoder": "new: from an encoder",
}
"""Descriptions of the caches in which an image can be found, by their name in the trace."""
HELP = (
    "/image PATH or URL is sent with the next question, /clear starts a new conversation, /save "
    "PATH writes it as JSON, /quit exits; anything else is a question"
)


def ask_server(
    base_url: str,
    api_key: str | None,
    model: str | None,
    question: str,
    images: Sequence[Path],
    max_tokens: int,
) -> None:
    """Ask one question with images, and print the answer as it arrives.

    Raises a SaccadeError if an image cannot be read, the server does not respond, or it returns an
    error.
    """
    parts = [read_image(str(path), "--image")[0] for path in images]
    with _Session(base_url, api_key, model, max_tokens) as session:
        session.parts = parts
        session.ask(question)


def converse(
    base_url: str,
    api_key: str | None,
    model: str | None,
    images: Sequence[Path],
    max_tokens: int,
    lines: Iterable[str],
) -> None:
    """Hold a conversation, in which each of `lines` is a question or a command (see `HELP`).

    After an error, the conversation continues as if the question had not been asked. Ctrl-C stops
    only the current answer. Raises a SaccadeError if one of `images` cannot be read, or if the
    server does not respond at the start.
    """
    parts = [read_image(str(path), "--image")[0] for path in images]
    with _Session(base_url, api_key, model, max_tokens) as session:
        session.parts = parts
        for line in lines:
            try:
                if not session.execute(line.strip()):
                    return
            except SaccadeError as error:
                print(f"error: {error}", flush=True)
            except KeyboardInterrupt:
                print("\nstopped: the answer is discarded", flush=True)


def typed() -> Iterator[str]:
    """Yield the lines of standard input. On a terminal, print a prompt for each of them.

    Ctrl-C discards a partly typed line. On an empty line, it ends the conversation.
    """
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # gives `input` line editing and a history

    def interrupt(*_: object) -> None:  # pass on the line, which is lost once `input` has returned
        raise KeyboardInterrupt(readline.get_line_buffer())

    signal.signal(signal.SIGINT, interrupt)
    print(HELP)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt as interrupted:
            print()
            if not any(interrupted.args):
                return
            continue
        yield line


class _Session:
    """One conversation with a server. `parts` are the images to send with the next question.

    Raises a SaccadeError if the server does not respond or lists no model.
    """

    def __init__(
        self, base_url: str, api_key: str | None, model: str | None, max_tokens: int
    ) -> None:
        self.parts: list[dict[str, Any]] = []
        self._address = root(base_url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model or first_model(self._address, headers, TIMEOUT)
        self._max_tokens = max_tokens
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT)
        self._messages: list[dict[str, Any]] = []
        self._ours: bool | None = None

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def execute(self, line: str) -> bool:
        """Ask the question, or run the command, in `line`. Returns False if it ends the
        conversation. Raises SaccadeError.
        """
        word, _, rest = line.partition(" ")
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/image" if rest:
                part, told = read_image(rest.strip(), "/image")
                self.parts.append(part)
                print(f"{told} goes with the next question", flush=True)
            case "/clear":
                print(f"forgotten: {_count(self._messages, self.parts)}", flush=True)
                self.parts, self._messages = [], []
            case "/save" if rest:
                self._save(Path(rest.strip()).expanduser())
            case _ if word.startswith("/"):
                print(HELP)
            case _:
                for told in self.ask(line, explain=True):
                    print(told, flush=True)
        return True

    def ask(self, question: str, explain: bool = False) -> list[str]:
        """Ask a question, print the answer as it arrives, and add both to the history.

        Returns lines that describe the cache hits, if `explain` is True. Raises SaccadeError.
        """
        content = [*self.parts, {"type": "text", "text": question}]
        messages = [*self._messages, {"role": "user", "content": content}]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "stream": True,
        }
        if explain:
            body["stream_options"] = {"include_usage": True}
            if self._is_ours():
                body["saccade"] = {"trace": True}
        try:
            url = f"{self._address}/v1/chat/completions"
            with self._client.stream("POST", url, json=body) as response:
                if response.is_error:
                    text = response.read().decode(errors="replace")
                    why = refusal(response.status_code, text)
                    removed = self._forget_images(response.status_code)
                    raise SaccadeError(
                        f"{why.rstrip('.')}. {removed}" if removed and explain else why
                    )
                answer, told = print_stream(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(self._address, error) from None
        except httpx.HTTPError as error:
            raise SaccadeError(f"{shown_url(self._address)}: {cause(error)}") from None
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        self.parts = []
        return told

    def _forget_images(self, status: int) -> str:
        """Remove the images for the next question if they may have caused an error with this HTTP
        status. Returns a message for the user, or "".
        """
        if not self.parts or status not in REFUSED:
            return ""
        number, self.parts = len(self.parts), []
        removed = "The image was" if number == 1 else f"The {number} images were"
        return f"{removed} removed: add another with /image"

    def _is_ours(self) -> bool:
        """Return True if the server is Saccade. Other servers may reject the request field
        `saccade`.
        """
        if self._ours is None:
            try:
                models = self._client.get(f"{self._address}/v1/models").json()["data"]
                self._ours = any(model.get("owned_by") == "saccade" for model in models)
            except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
                self._ours = False
        return self._ours

    def _save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps({"messages": self._messages}, indent=1, ensure_ascii=False))
        except OSError as error:
            raise SaccadeError(f"/save {path}: {error.strerror}") from None
        print(f"{_count(self._messages)} in {path}", flush=True)


def print_stream(response: httpx.Response) -> tuple[str, list[str]]:
    """Print the text of streamed chat completion chunks as they arrive.

    Returns the text, and lines that describe the cache hits that the server reports. Raises
    SaccadeError if the stream ends with an error.
    """
    text, told = "", list[str]()
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            print()
            raise SaccadeError(said(event) or json.dumps(event["error"]))
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            print(piece, end="", flush=True)
            text += piece
        if event.get("usage") or event.get("saccade"):
            told = list(_describe_hits(event))
    print()
    return text, told


def _describe_hits(event: dict[str, Any]) -> Iterator[str]:
    """Yield lines that describe the cache hits in the last chunk of a stream."""
    usage = event.get("usage") or {}
    if (total := usage.get("prompt_tokens")) is not None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        yield f"  {cached} of {total} prompt tokens cached"
    for number, image in enumerate((event.get("saccade") or {}).get("images", ()), 1):
        place = FOUND.get(image["found"], image["found"])
        place += f" ({image['tier']})" if image.get("tier") else ""
        missed = "".join(f"; not in {level}: {why}" for level, why in image["missed"].items())
        spent = sum(image["ms"].values())
        yield f"  image {number} ({image['digest'][:12]}) {place}, {spent:.1f} ms{missed}"


def read_image(name: str, asked: str) -> tuple[dict[str, Any], str]:
    """Return a content part for the image `name`, a file or a URL, and a description of the image.

    asked: the option or command that error messages name. Raises ConfigError.
    """
    if name.startswith(("http://", "https://", "data:")):
        url, told = name, name if len(name) < 100 else f"{name[:100]} ..."
    else:
        path = Path(name).expanduser()
        try:
            with open(path, "rb", opener=regular) as file:
                data = file.read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{asked} {shown(path)}: {reason(error)}") from None
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        url, told = (
            f"data:{kind};base64,{base64.b64encode(data).decode()}",
            _look(data, path, asked),
        )
    return {"type": "image_url", "image_url": {"url": url}}, told


def _look(data: bytes, path: Path, asked: str) -> str:
    """Return a description of an image file: its path, format and size. Raises ConfigError if it is
    not an image.

    Files in HEIC and similar formats are not checked, because this client may not support them.
    """
    if data[4:8] == b"ftyp":
        return str(path)
    try:
        with Image.open(io.BytesIO(data)) as image:
            return f"{path} ({image.format}, {image.width} x {image.height})"
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        why = "it is empty" if not data else "it is not an image, or it is damaged"
        raise ConfigError(f"{asked} {path}: {why}; use a PNG, JPEG or WebP file") from None


def _count(messages: Sequence[object], parts: Sequence[object] = ()) -> str:
    told = [f"{len(messages)} message{'s' * (len(messages) != 1)}"]
    told += [f"{len(parts)} image{'s' * (len(parts) != 1)}"] if parts else []
    return " and ".join(told)
