"""Requests to every route that a server describes: valid ones, and such as are changed in a few
places.

Owns what is drawn; the same seed draws the same. Paths, bodies and forms come from the server's own
`/openapi.json`, so that no route can be forgotten. Knows nothing of what the server should answer.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade_bench.attacks import raw
from tests.abuse import values
from tests.abuse.grammar import QUERIES, TEXTS, URLS, Grammar
from tests.abuse.readings import PICTURES, RERANKS, SCORES, Body, Readings

OPERATORS = frozenset(
    {
        "/pause",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/sleep",
        "/update_weights",
        "/update_weights_from_disk",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""An operator's routes, after which a server may answer nothing."""
OTHER_NAMES = {"/v1/rerank": RERANKS, "/v1/score": SCORES}
"""Routes under all of their paths."""
SHORT = 3
"""Tokens of an answer."""
_PICTURE = base64.b64decode(PICTURES[0].partition(",")[2])
_LENGTHS = ("max_tokens", "max_output_tokens")
_JUNK = ("x", "%00", "%2e%2e%2f", "file-" + "0" * 64 + "-00000000", "%ff", "é".encode().hex())


@dataclass(frozen=True)
class Route:
    """A method and a path. example: a body of the document. form: it takes an upload."""

    method: str
    path: str
    example: Any
    form: bool

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


def routes_of(document: Mapping[str, Any]) -> list[Route]:
    """The routes of an OpenAPI document, in its order, without an operator's."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            example = content.get("application/json", {}).get("example")
            form = "multipart/form-data" in content
            names = OTHER_NAMES.get(path, () if path in OPERATORS else (path,))
            found += [Route(method.upper(), name, example, form) for name in names]
    return found


def upload(data: bytes, purpose: str = "vision") -> tuple[str, bytes]:
    """The content type and bytes of a form with a file."""
    part = "content-disposition: form-data; name="
    head = f'--x\r\n{part}"purpose"\r\n\r\n{purpose}\r\n--x\r\n{part}"file"; filename="a"\r\n\r\n'
    return "multipart/form-data; boundary=x", head.encode() + data + b"\r\n--x--\r\n"


class Requests:
    """Draws requests. `ids`: objects of the server, by the path that lists them; "batch inputs":
    files that a batch may have.
    """

    def __init__(
        self, seed: int, routes: Sequence[Route], ids: Mapping[str, Sequence[str]]
    ) -> None:
        self._draw = random.Random(seed)
        self._routes, self._ids = routes, ids
        self._readings = Readings(self._draw)
        self._grammar = Grammar(seed, ids["/v1/models"][0], hard=True)

    def valid(self) -> Iterator[tuple[Route, bytes]]:
        """Yield a valid request to each route, those that delete last."""
        for route in sorted(self._routes, key=lambda route: route.method == "DELETE"):
            body = self._bodies(route)[0]
            data = None if body is None else json.dumps(body).encode()
            yield route, self._request(route, self._path(route, 1), data, upload(_PICTURE))

    def requests(self, count: int) -> Iterator[tuple[Route, bytes]]:
        """Yield so many, half of them changed."""
        draw = self._draw
        for _ in range(count):
            route = draw.choice(self._routes)
            path = self._path(route, 0.8)
            if draw.random() < 0.1:
                path += f"?{draw.choice(('limit', 'after', 'order', 'x'))}={draw.choice(QUERIES)}"
            body = draw.choice(self._bodies(route))
            data = None
            if body is not None:
                plain = draw.random() < 0.8
                data = self._changed(body) if plain else self._grammar.body(route.path)[1]
            form = self._grammar.upload() if draw.random() < 0.5 else upload(_PICTURE)
            yield route, self._request(route, path, data, form)

    def _path(self, route: Route, known: float) -> str:
        """The path with an id, which is the server's own with the probability `known`."""
        ids = self._ids.get(route.path.split("/{")[0], ())
        own = ids and self._draw.random() < known
        return re.sub(r"\{\w+\}", self._draw.choice(ids if own else _JUNK), route.path)

    def _request(
        self, route: Route, path: str, data: bytes | None, form: tuple[str, bytes]
    ) -> bytes:
        if route.form:
            return raw.post(path, form[1], content_type=form[0])
        if data is not None:
            return raw.post(path, data)
        return raw.head(route.method, path, content_length=0)

    def _bodies(self, route: Route) -> list[Any]:
        """The valid bodies for a route, the document's first; None where it takes none."""
        if route.path == "/v1/batches" and route.example is not None:
            return [
                {**route.example, "input_file_id": self._draw.choice(self._ids["batch inputs"])}
            ]
        if route.example is None:
            return [None]
        more = [body for path, body in values.BODIES if path == route.path]
        reading = self._readings.body(route.path)
        more += [] if reading is None else [reading] * 3
        bodies = [copy.deepcopy(route.example), *copy.deepcopy(more)]
        for body in bodies:
            body |= {name: SHORT for name in _LENGTHS if name in body}
            if "model" in body:
                body["model"] = self._ids["/v1/models"][0]
        return bodies

    def _changed(self, body: Body) -> bytes:
        """Write a body as JSON, half of the time with a few changes."""
        draw = self._draw
        for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
            if not body:
                break
            *before, last = draw.choice([place for place in values.places(body) if place])
            at: Any = body
            for key in before:
                at = at[key]
            change = draw.randrange(4)
            if change == 0:
                del at[last]
            elif change == 1 and isinstance(at, list):
                at += copy.deepcopy(at[-1:])
            elif change == 1:
                at[draw.choice(("x", "type", "instruction", "dimensions", "top_n"))] = at[last]
            else:
                at[last] = draw.choice(
                    (*TEXTS, *PICTURES, *URLS, 0, -1, 1, 0.5, None, True, [], {})
                )
        if not body or draw.random() > 0.15:
            return json.dumps(body).encode()
        return values.bent(
            body, draw.choice(list(values.places(body))), draw.choice([*values.VALUES.values()])
        )
