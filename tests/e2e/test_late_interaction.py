"""Late interaction over HTTP: the vectors and the scores are transformers', a page is encoded once
for search and answer, and what these models were not trained for is refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest

from saccade_bench.fixtures.pdf import Sheet, pdf
from saccade_bench.fixtures.server import Server, serving
from tests.fixtures.colqwen import WIDTH, ColQwenReference, Content, make_colqwen
from tests.fixtures.tiny import picture
from tests.helpers.adapters import LANGUAGE, train
from tests.helpers.images import image_part, png_url, text_part, user

pytestmark = pytest.mark.more

TOLERANCE = 1e-5
ENCODED = "saccade_images_encoded_total"
QUERIES = ("how many red circles are there?", "a star")
SIZES = ((64, 96), (90, 120), (200, 60))
PAGES = [picture(*size, seed=size[0]) for size in SIZES]


@dataclass(frozen=True)
class Served:
    server: Server
    reference: ColQwenReference
    search: ColQwenReference  # with the adapter "search"

    def embed(self, pages: list[np.ndarray], **fields: Any) -> Any:
        chats = [[user(image_part(page))] for page in pages]
        return self.server.post("/v1/embeddings", {"messages": chats, **fields})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    reference = make_colqwen(tmp_path_factory.mktemp("model"))
    folder, logs = tmp_path_factory.mktemp("adapter"), tmp_path_factory.mktemp("log")
    modules = rf"{LANGUAGE}|embedding_proj_layer"
    trained = train(folder, reference, 1, modules, r=4, lora_alpha=1).merged
    assert isinstance(trained, ColQwenReference)
    options = ("--dtype", "float32", "--served-model-name", "tiny", "--lora", f"search={folder}")
    with serving(reference.folder, logs, *options) as server:
        yield Served(server, reference, trained)


def content(page: np.ndarray) -> dict[str, Any]:
    return {"content": [image_part(page)]}


def matrices(answer: Any) -> list[np.ndarray]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    found = [np.array(each["embedding"]) for each in answer["data"]]
    assert [list(each.shape) for each in found] == [each["shape"] for each in answer["data"]]
    return found


def check(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert max(np.abs(a - b).max() for a, b in zip(found, expected)) < TOLERANCE


def test_every_token_has_the_vector_of_the_reference(served: Served) -> None:
    queries = [served.reference.embedding(query) for query in QUERIES]
    answer = served.server.post("/v1/embeddings", {"input": list(QUERIES)})
    check(matrices(answer), queries)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, queries))
    pages = [served.reference.embedding(page) for page in PAGES]
    check(matrices(served.embed(PAGES)), pages)
    check(matrices(served.embed(PAGES, dimensions=WIDTH)), pages)
    tokens = [5, 9, 300, 41]
    raw = served.server.post("/v1/embeddings", {"input": tokens})
    check(matrices(raw), [served.reference.vectors(tokens)])


def test_base64_is_float32_row_by_row_with_its_shape(served: Served) -> None:
    expected = matrices(served.embed(PAGES))
    for each, matrix in zip(served.embed(PAGES, encoding_format="base64")["data"], expected):
        values = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        assert np.array_equal(values.reshape(each["shape"]), matrix.astype(np.float32))
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="x", max_retries=0)
    (found,) = client.embeddings.create(model="tiny", input=QUERIES[0]).data  # asks for base64
    shape = found.model_extra["shape"] if found.model_extra else ()
    check([np.reshape(found.embedding, shape)], [served.reference.embedding(QUERIES[0])])


def test_special_tokens_in_a_query_are_text(served: Served) -> None:
    text = "a<|image_pad|>b"
    (found,) = matrices(served.server.post("/v1/embeddings", {"input": text}))
    assert len(found) > len(served.reference.tokens(served.reference.prompt(text)))


def test_scores_are_the_reference_s(served: Served) -> None:
    expected = [served.reference.score(QUERIES[0], page) for page in PAGES]
    documents = [content(page) for page in PAGES]
    asked = {"query": QUERIES[0], "documents": documents}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = served.server.post(path, {**asked, "top_n": 2})["results"]
        assert [each["index"] for each in results] == list(np.argsort(expected)[::-1][:2])
        for each in results:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
    pairs = {"text_1": [*QUERIES, content(PAGES[0])], "text_2": documents}
    scores = [each["score"] for each in served.server.post("/v1/score", pairs)["data"]]
    queries: tuple[Content, ...] = (*QUERIES, PAGES[0])
    expected = [served.reference.score(*each) for each in zip(queries, PAGES, strict=True)]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_a_page_is_encoded_once_for_search_and_answer(served: Served) -> None:
    """The adapter leaves the tower alone, so search with it and chat without it share pages."""
    pages = [picture(64, 64, seed=100 + i) for i in range(5)]
    before = served.server.metric(ENCODED)
    found = matrices(served.embed(pages, model="search"))
    check(found, [served.search.embedding(page) for page in pages])
    plain = matrices(served.embed(pages, model="tiny"))
    assert min(np.abs(a - b).max() for a, b in zip(found, plain)) > 0.1, "the adapter shows"
    documents = [content(page) for page in pages]
    for query in QUERIES:
        asked = {"model": "search", "query": query, "documents": documents}
        answer = served.server.post("/rerank", asked)
        assert answer["model"] == "search"
        best = answer["results"][0]
        assert best["relevance_score"] == pytest.approx(
            served.search.score(query, pages[best["index"]]), abs=1e-4
        )
        page = pages[best["index"]]
        served.server.chat(user(image_part(page), text_part(query)), max_tokens=4)
    for page in pages:
        served.server.chat(user(image_part(page), text_part("what is there?")), max_tokens=4)
    assert served.server.metric(ENCODED) == before + len(pages)


def test_a_page_of_a_document_is_an_image(served: Served) -> None:
    data = pdf([Sheet(image=page) for page in PAGES[:2]])
    file = {"file_data": f"data:application/pdf;base64,{base64.b64encode(data).decode()}"}
    both = {"type": "file", "file": file}
    part = {"type": "file", "file": {**file, "page": 2}}
    (found,) = matrices(served.server.post("/v1/embeddings", {"messages": [user(part)]}))
    start, end = served.reference.prompt(PAGES[0]).split(served.reference.placeholder)
    around = [len(served.reference.tokens(each)) for each in (start, end)]
    assert len(found) > sum(around), "the page is shown"
    asked = {"query": QUERIES[0], "documents": [{"content": [part]}]}
    (result,) = served.server.post("/rerank", asked)["results"]
    queries = matrices(served.server.post("/v1/embeddings", {"input": QUERIES[0]}))[0]
    assert result["relevance_score"] == pytest.approx((queries @ found.T).max(1).sum(), abs=1e-4)
    before = served.server.metric(ENCODED)
    served.server.chat(user(part, text_part("what is there?")), max_tokens=4)
    assert served.server.metric(ENCODED) == before
    error = served.server.post("/v1/embeddings", {"messages": [user(both)]}, 400)["error"]
    assert "one page of a document" in error["message"]


def test_a_query_is_read_once_for_all_pages_and_again_for_none(served: Served) -> None:
    made = "saccade_readouts_total"
    documents = [content(picture(64, 64, seed=200 + i)) for i in range(4)]
    asked = {"query": "a new query", "documents": documents}
    before = served.server.metric(made, source="model")
    first = served.server.post("/rerank", asked)["results"]
    assert served.server.metric(made, source="model") == before + 1 + len(documents)
    assert served.server.post("/rerank", asked)["results"] == first
    alone = served.server.post("/rerank", {**asked, "documents": documents[:1]})["results"]
    assert alone[0] == next(each for each in first if each["index"] == 0)
    assert served.server.metric(made, source="model") == before + 1 + len(documents)


BOTH = [user(text_part("a"), image_part(PAGES[0]))]
TWO = [user(image_part(PAGES[0]), image_part(PAGES[1]))]
SYSTEM = [{"role": "system", "content": "Find."}, user(image_part(PAGES[0]))]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions", "32 values, and were"),
        ("/v1/embeddings", {"input": "a", "instruction": "b"}, "instruction", "without"),
        ("/v1/embeddings", {"messages": SYSTEM}, "instruction", "without instructions"),
        ("/v1/embeddings", {"messages": BOTH}, "messages", "a text, an image, or"),
        ("/v1/embeddings", {"messages": TWO}, "messages", "a text, an image, or"),
        ("/v1/embeddings", {"input": [[7] * 4000] * 132}, None, "over 524288 tokens"),
        ("/v2/embed", {"texts": ["a"]}, "model", "use /v1/embeddings"),
        ("/v2/embed", {"images": [png_url(PAGES[0])]}, "model", "use /v1/embeddings"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "documents[0]", "send an image"),
        ("/score", {"text_1": "a", "text_2": ["b"]}, "text_2[0]", "send an image"),
        ("/rerank", {"query": "", "documents": [content(PAGES[0])]}, "query", "must not be empty"),
    ],
)
def test_what_the_model_was_not_trained_for_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    error = served.server.post(path, body, 400)["error"]
    assert error["param"] == param and says in error["message"], error


def test_an_unknown_model_is_not_found(served: Served) -> None:
    error = served.server.post("/v1/embeddings", {"input": "a", "model": "other"}, 404)["error"]
    assert error["code"] == "model_not_found"
