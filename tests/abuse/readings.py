"""Bodies for embeddings, ranks and decisions that reach their work.

Owns what is drawn; the same seed draws the same. Knows nothing of what the server should answer.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import PIL.Image

from tests.abuse.grammar import TEXTS, URLS
from tests.helpers.images import data_url

RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORES = ("/score", "/v1/score")
SIZES = ((64, 64), (96, 64), (1, 1), (3, 200), (130, 70))
Body = dict[str, Any]


def _picture(size: tuple[int, int]) -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, (size[0], 90, size[1])).save(file, "PNG")
    return data_url(file.getvalue())


PICTURES = tuple(map(_picture, SIZES))


class Readings:
    """Draws bodies with the generator `draw`."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._bodies: dict[str, Callable[[], Body]] = {
            "/v1/embeddings": self._embeddings,
            "/v2/embed": self._embed,
            "/v1/decisions": self._decisions,
            **dict.fromkeys(RERANKS, self._rerank),
            **dict.fromkeys(SCORES, self._score),
        }

    def body(self, path: str) -> Body | None:
        """Return a valid body, or None for a path that reads nothing."""
        draw = self._bodies.get(path)
        return None if draw is None else draw()

    # ---- bodies

    def _embeddings(self) -> Body:
        draw, body = self._draw, self._scope()
        if draw.random() < 0.4:
            chats = [[self._message()] for _ in range(self._count())]
            body["messages"] = draw.choice((chats, chats[0]))
        else:
            tokens = [draw.randrange(100) for _ in range(draw.choice((1, 5, 200)))]
            texts = [self._text() for _ in range(self._count())]
            body["input"] = draw.choice((texts, texts[0], tokens, [tokens, tokens[:1]]))
        if draw.random() < 0.4:
            body["dimensions"] = draw.choice((1, 7, 64, 65))
        if draw.random() < 0.4:
            body["encoding_format"] = draw.choice(("float", "base64"))
        return body

    def _embed(self) -> Body:
        draw, body = self._draw, self._scope()
        inputs = [
            {"content": [self._part() for _ in range(draw.choice((1, 1, 2)))]}
            for _ in range(self._count())
        ]
        texts = [self._text() for _ in range(self._count())]
        pictures = [draw.choice(PICTURES) for _ in range(self._count())]
        body |= draw.choice(({"texts": texts}, {"images": pictures}, {"inputs": inputs}))
        body["input_type"] = draw.choice(("search_query", "search_document", "image"))
        body["embedding_types"] = draw.choice((["float"], ["base64", "float"]))
        if draw.random() < 0.3:
            body["output_dimension"] = draw.choice((1, 32, 64))
        return body

    def _rerank(self) -> Body:
        draw = self._draw
        documents = [self._content() for _ in range(self._count())]
        body = {**self._scope(), "query": self._content(), "documents": documents}
        if draw.random() < 0.4:
            body["top_n"] = draw.choice((1, 2, 100))
        if draw.random() < 0.4:
            body["return_documents"] = True
        return body

    def _score(self) -> Body:
        draw = self._draw
        names = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
        first, second = draw.choice(names)
        several = [self._content() for _ in range(self._count())]
        both = draw.random() < 0.3
        query = [self._content() for _ in several] if both else self._content()
        return {**self._scope(), first: query, second: several}

    def _decisions(self) -> Body:
        draw = self._draw
        content = [self._part("input_text", "input_image") for _ in range(draw.choice((1, 2, 3)))]
        given = draw.choice((self._text(), [{"role": "user", "content": content}]))
        questions = [self._question() for _ in range(self._count())]
        body = {"input": given, "questions": questions}
        if draw.random() < 0.2:
            body["cache_salt"] = self._text()
        if draw.random() < 0.2:
            body["prompt_cache_key"] = self._text()
        return body

    def _question(self) -> Body:
        draw = self._draw
        json_part = {"type": "input_json", "data": {"a": [1, self._text()]}}
        parts = [{"type": "input_text", "text": self._text()}, json_part]
        body: Body = {"instructions": draw.choice((self._text(), parts))}
        if draw.random() < 0.3:
            body["name"] = self._text()
        answers = range(draw.choice((2, 3, 20)))
        choices = [{"value": f"{i}", "description": self._text()} for i in answers]
        levels = [{"label": f"{self._text()}{i}"} for i in answers]
        kinds = ({"type": "predicate"}, {"type": "choice", "choices": choices})
        return body | draw.choice((*kinds, {"type": "score", "levels": levels}))

    # ---- parts of them

    def _scope(self) -> Body:
        draw = self._draw
        body: Body = {}
        if draw.random() < 0.2:
            body["instruction"] = self._text()
        if draw.random() < 0.2:
            body["cache_salt"] = self._text()
        if draw.random() < 0.1:
            body["mm_processor_kwargs"] = {"min_pixels": 4096, "max_pixels": 65536}
        return body

    def _count(self) -> int:
        return self._draw.choice((1, 1, 2, 3, 12))

    def _message(self) -> Body:
        draw = self._draw
        parts = [self._part() for _ in range(draw.choice((1, 2)))]
        return {"role": "user", "content": draw.choice((self._text(), parts))}

    def _content(self) -> object:
        draw = self._draw
        parts = [self._part() for _ in range(draw.choice((1, 1, 2)))]
        forms = (self._text(), {"text": self._text()}, {"content": parts})
        return draw.choice(forms)

    def _part(self, text: str = "text", image: str = "image_url") -> Body:
        draw = self._draw
        if draw.random() < 0.6:
            return {"type": text, "text": self._text()}
        url = draw.choice(PICTURES) if draw.random() < 0.95 else draw.choice(URLS)
        flat = image == "input_image"
        return {"type": image, "image_url": url if flat else {"url": url}}

    def _text(self) -> str:
        draw = self._draw
        words = ("a fox", "two red circles", "a" * 300, "é𝄞", "<|im_end|>", "<|image_pad|>")
        return draw.choice(words if draw.random() < 0.97 else TEXTS)
