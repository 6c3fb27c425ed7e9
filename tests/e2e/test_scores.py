"""Embeddings and ranks over HTTP are those of transformers on prompts that the models' authors
write, image by image; asked again they cost nothing, and what is too much is refused by name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from saccade_bench.fixtures.server import Server, routing, serving
from tests.e2e.ways import KEY, WITH_KEY
from tests.fixtures.tiny import CHAT_TEMPLATE, Reference, picture
from tests.helpers.images import image_part, png_url, text_part

pytestmark = pytest.mark.more

FLAGS = ("--dtype", "float32", "--api-key", KEY, "--metrics-without-key")
SIZES = ((64, 96), (90, 120), (200, 60), (128, 128))
TEXTS = ("the quick brown fox", "two blue squares", "how many red circles are there?", "a star")
PICTURES = [picture(*size, seed=size[0]) for size in SIZES]
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
TASK = "Given a search query, retrieve relevant candidates that answer the query."
YES, NO = 88, 77
Content = Sequence[str | np.ndarray]


def parts(content: Content) -> list[dict[str, Any]]:
    return [text_part(each) if isinstance(each, str) else image_part(each) for each in content]


class Author:
    """A checkpoint as its authors run it: their conversation, their template, transformers."""

    def __init__(self, folder: Path, reference: Reference) -> None:
        self.reference = reference
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), chat_template=CHAT_TEMPLATE
        )

    def ids(self, system: str, content: Content) -> tuple[list[int], list[np.ndarray]]:
        images = [each for each in content if isinstance(each, np.ndarray)]
        pixels = [self.reference.resize(each) for each in images]
        said: Any = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
            for each in content
        ]
        chat: Any = [
            {"role": "system", "content": [{"type": "text", "text": system}]},
            {"role": "user", "content": said},
        ]
        text: Any = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(self.reference.expand(text, pixels)).input_ids), pixels

    def embedding(
        self, content: Content, system: str = "Represent the user's input."
    ) -> np.ndarray:
        state = self.reference.states(*self.ids(system, content))[-1].double()
        return (state / state.norm()).numpy()

    def score(self, query: Content, document: Content, task: str = TASK) -> float:
        said = (f"<Instruct>: {task}", "<Query>:", *query, "\n<Document>:", *document)
        logits = self.reference.logits(*self.ids(JUDGE, said))[-1]
        return float(torch.sigmoid(logits[YES] - logits[NO]))


@pytest.fixture(scope="module")
def author(checkpoint: Callable[..., Path], reference: Callable[..., Reference]) -> Author:
    return Author(checkpoint("qwen3_vl", pooling="embed"), reference("qwen3_vl", pooling="embed"))


@pytest.fixture(scope="module")
def judge(checkpoint: Callable[..., Path], reference: Callable[..., Reference]) -> Author:
    return Author(checkpoint("qwen3_vl", pooling="rank"), reference("qwen3_vl", pooling="rank"))


@pytest.fixture(scope="module")
def embedder(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embedder")
    with serving(checkpoint("qwen3_vl", pooling="embed"), folder, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranker")
    few = ("--chunked-prefill-size", "32", "--max-images-per-request", "1000")
    with serving(checkpoint("qwen3_vl", pooling="rank"), folder, *FLAGS, *few) as server:
        yield server


def vectors(answer: Any) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]])


def check(found: np.ndarray, expected: Sequence[np.ndarray]) -> None:
    assert found.shape == (len(expected), 64)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
    assert (found * np.stack(expected)).sum(axis=1).min() > 0.99999


def test_embeddings_are_those_of_the_reference(embedder: Server, author: Author) -> None:
    contents: list[Content] = [
        (PICTURES[0],),
        (PICTURES[1], TEXTS[0]),
        (TEXTS[1],),
        ("first", *PICTURES),
    ]
    chats = [[{"role": "user", "content": parts(content)}] for content in contents]
    answer = embedder.post("/v1/embeddings", {"messages": chats})
    check(vectors(answer), [author.embedding(content) for content in contents])
    lengths = [len(author.ids("Represent the user's input.", each)[0]) for each in contents]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    texts = embedder.post("/v1/embeddings", {"input": list(TEXTS)})
    check(vectors(texts), [author.embedding((text,)) for text in TEXTS])
    told = {"role": "system", "content": "Find the same picture"}
    asked = {"messages": [told, *chats[1], {"role": "assistant", "content": ""}]}
    vllm = {"add_special_tokens": True, "continue_final_message": True}
    found = vectors(embedder.post("/v1/embeddings", {**asked, **vllm}))
    check(found, [author.embedding(contents[1], "Find the same picture.")])
    single = {"input": TEXTS[2], "instruction": "Which animal?"}
    check(
        vectors(embedder.post("/v1/embeddings", single)),
        [author.embedding((TEXTS[2],), "Which animal?")],
    )


def test_tokens_are_embedded_as_they_are(embedder: Server, author: Author) -> None:
    lists = [[5, 9, 300, 41], [7] * 40]
    found = vectors(embedder.post("/v1/embeddings", {"input": lists}))
    states = [author.reference.states(tokens)[-1].double() for tokens in lists]
    check(found, [(state / state.norm()).numpy() for state in states])
    alone = vectors(embedder.post("/v1/embeddings", {"input": lists[0]}))
    assert np.abs(alone[0] - found[0]).max() < 1e-6


def test_dimensions_cut_and_normalise_in_both_encodings(embedder: Server) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    whole = client.embeddings.create(model=model, input=list(TEXTS), encoding_format="float")
    cut = client.embeddings.create(model=model, input=list(TEXTS), dimensions=16)  # in base64
    for long, short in zip(whole.data, cut.data, strict=True):
        first = np.array(long.embedding[:16])
        assert np.abs(first / np.linalg.norm(first) - short.embedding).max() < 1e-6
    with pytest.raises(
        openai.BadRequestError, match="dimensions: 65; this model's embeddings have 64"
    ):
        client.embeddings.create(model=model, input="a", dimensions=65)


def test_a_region_is_embedded_as_the_crop_that_a_client_makes(embedder: Server) -> None:
    page = picture(96, 128, seed=6)

    def embedded(shown: Any, **region: Any) -> Any:
        (part,) = parts((shown,))
        part["image_url"] |= region
        message = {"role": "user", "content": [part]}
        return vectors(embedder.post("/v1/embeddings", {"messages": [message]}))[0]

    crop = embedded(page[32:96, 64:128])
    assert np.abs(embedded(page, region=[64, 32, 128, 96]) - crop).max() < 1e-6
    assert np.abs(embedded(page) - crop).max() > 1e-3


def test_a_page_is_encoded_once_and_a_repeated_input_costs_nothing(embedder: Server) -> None:
    page = picture(96, 96, seed=5)
    message = {"role": "user", "content": parts((page, "page"))}
    images, made = "saccade_images_encoded_total", "saccade_readouts_total"
    encoded, before = embedder.metric(images), embedder.metric(made, source="model")
    prompts = embedder.metric("saccade_prompt_tokens_total")
    asked = {"messages": [[message], [message]]}
    first, second = vectors(embedder.post("/v1/embeddings", asked))
    assert (first == second).all() and embedder.metric(made, source="model") == before + 1
    told = embedder.post("/v1/embeddings", {"messages": [message]})
    assert embedder.metric(made, source="model") == before + 1
    assert (vectors(told)[0] == first).all()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == told["usage"]["prompt_tokens"]
    other = embedder.post("/v1/embeddings", {"messages": [message], "instruction": "Search"})
    assert (vectors(other)[0] != first).any() and embedder.metric(images) == encoded + 1
    salted = embedder.post("/v1/embeddings", {"messages": [message], "cache_salt": "other"})
    assert np.abs(vectors(salted)[0] - first).max() < 1e-5
    assert embedder.metric(images) == encoded + 2, "another tenant shares nothing"
    assert embedder.metric("saccade_prompt_tokens_total") > prompts
    embedder.post("/flush_cache")
    after = embedder.metric(made, source="model")
    embedder.post("/v1/embeddings", {"messages": [message]})
    assert embedder.metric(made, source="model") == after + 1
    assert embedder.metric(images) == encoded + 3


def test_coheres_embed_is_spoken(embedder: Server, author: Author) -> None:
    inputs = [{"content": parts((TEXTS[0], PICTURES[2]))}, {"content": parts((TEXTS[3],))}]
    body = {"model": None, "inputs": inputs, "embedding_types": ["float", "base64"]}
    answer = embedder.post("/v2/embed", {**body, "input_type": "search_document"})
    found = np.array(answer["embeddings"]["float"])
    check(found, [author.embedding((TEXTS[0], PICTURES[2])), author.embedding((TEXTS[3],))])
    packed = [base64.b64decode(each) for each in answer["embeddings"]["base64"]]
    assert np.abs(np.frombuffer(packed[0], "<f4") - found[0]).max() < 1e-7
    query = {"texts": [TEXTS[1]], "input_type": "search_query"}
    told = np.array(embedder.post("/v2/embed", query)["embeddings"]["float"])
    check(
        told,
        [author.embedding((TEXTS[1],), "Retrieve images or text relevant to the user's query.")],
    )
    image = embedder.post("/v2/embed", {"images": [png_url(PICTURES[0])], "output_dimension": 8})
    assert len(image["embeddings"]["float"][0]) == 8


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (
            "/v1/embeddings",
            {"input": ["a"] * 100_000},
            "input",
            "100000 entries; the limit is 2048",
        ),
        ("/v1/embeddings", {"input": []}, "input", "the list must have at least one entry"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "the text must not be empty"),
        ("/v1/embeddings", {"input": [[1, 2], []]}, "input[1]", "must have at least one entry"),
        ("/v1/embeddings", {"input": [[1, 2], [3, 600]]}, "input[1]", "token 600 is not below"),
        ("/v1/embeddings", {"input": [[1], ["a"]]}, "input[1][0]", "expected"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input[1]", "expected"),
        ("/v1/embeddings", {"input": [7] * 5000}, "input", "maximum context length is 4096"),
        ("/v1/embeddings", {"input": [[7] * 4000] * 300}, None, "over 1048576 tokens"),
        ("/v1/embeddings", {}, "input", "required"),
        ("/v1/embeddings", {"input": "a", "messages": []}, "messages", "mutually exclusive"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ("/v1/embeddings", {"input": "a", "late": 1}, "late", "not supported"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages",
            "user's message",
        ),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types", "float"),
        ("/v2/embed", {}, "inputs", "send exactly one of texts, images and inputs"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "model", "Qwen3-VL-Reranker"),
    ],
)
def test_what_is_too_much_or_makes_no_sense_is_refused_by_name(
    embedder: Server, path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    before = embedder.metric("saccade_requests_total", outcome="stop")
    error = embedder.post(path, body, 400)["error"]
    assert error["param"] == param or (error["param"] or "").startswith(f"{param}[")
    assert says in error["message"], error
    assert embedder.metric("saccade_requests_total", outcome="stop") == before


def test_ranks_are_those_of_the_reference(ranker: Server, judge: Author) -> None:
    documents: list[Content] = [
        (PICTURES[0],),
        (TEXTS[1],),
        (PICTURES[1], TEXTS[0]),
        (PICTURES[3],),
    ]
    expected = [judge.score(("which is blue?",), each) for each in documents]
    assert max(expected) - min(expected) > 0.01
    sent = [{"content": parts(each)} for each in documents]
    asked = {"query": "which is blue?", "documents": sent}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = ranker.post(path, asked)["results"]
        assert [each["index"] for each in results] == list(np.argsort(expected)[::-1])
        for each in results:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
    best = ranker.post("/rerank", {**asked, "top_n": 1, "return_documents": True})["results"]
    assert [each["document"] for each in best] == [sent[int(np.argmax(expected))]]
    query = {"content": parts((PICTURES[2], TEXTS[2]))}
    body = {"queries": query, "documents": sent, "instruction": "Same colour?"}
    scored = ranker.post("/score", body)["data"]
    for each, document in zip(scored, documents, strict=True):
        wanted = judge.score((PICTURES[2], TEXTS[2]), document, "Same colour?")
        assert each["score"] == pytest.approx(wanted, abs=1e-4)
    pairs = {"text_1": [TEXTS[0], TEXTS[1]], "text_2": [TEXTS[2], TEXTS[3]]}
    found = [each["score"] for each in ranker.post("/v1/score", pairs)["data"]]
    assert found[1] == pytest.approx(judge.score((TEXTS[1],), (TEXTS[3],)), abs=1e-4)
    error = ranker.post("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400)["error"]
    assert "2 queries do not match 1 documents" in error["message"]


def test_a_page_is_encoded_once_for_all_queries(ranker: Server) -> None:
    pages = [{"content": parts((picture(64, 64, seed=100 + i),))} for i in range(20)]
    before = ranker.metric("saccade_images_encoded_total")
    for query in ("red", "blue", "a star"):
        ranker.post("/rerank", {"query": query, "documents": pages})
    assert ranker.metric("saccade_images_encoded_total") == before + 20


def test_a_chat_model_says_what_it_was_not_trained_for(tiny: Server) -> None:
    assert "--pooling last" in json.dumps(tiny.post("/v1/embeddings", {"input": "a"}, 400))


def test_any_chat_model_embeds_with_its_last_state(
    checkpoint: Callable[..., Path], reference: Callable[..., Reference], tmp_path: Path
) -> None:
    chatter = Author(checkpoint("qwen3_vl"), reference("qwen3_vl"))
    system = "You are a helpful assistant."  # which the template writes by itself
    with serving(checkpoint("qwen3_vl"), tmp_path, *FLAGS, "--pooling", "last") as server:
        found = server.post("/v1/embeddings", {"input": TEXTS[0]})
        check(vectors(found), [chatter.embedding((TEXTS[0],), system)])
        assert "not calibrated" in server.log.read_text()


@pytest.mark.slow
def test_a_hundred_pages_are_encoded_once_for_fifty_queries(ranker: Server) -> None:
    pages = [{"content": parts((picture(64, 64, seed=1000 + i),))} for i in range(100)]
    before = ranker.metric("saccade_images_encoded_total")
    colours = ("red", "blue", "green", "grey", "black")
    things = ("star", "fox", "dog", "square", "circle", "tree", "house", "line", "word", "number")
    for query in (f"a {colour} {thing}" for colour in colours for thing in things):
        results = ranker.post("/rerank", {"query": query, "documents": pages})["results"]
        assert len(results) == 100
    assert ranker.metric("saccade_images_encoded_total") == before + 100


@pytest.mark.slow
def test_a_thousand_pairs_rank_as_the_reference_ranks_them(
    embedder: Server, author: Author
) -> None:
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dog",
        "red",
        "blue",
        "green",
        "star",
        "squares",
    ]
    pages: list[Content] = [
        (picture(64, 32 * (1 + i % 4), seed=2000 + i), words[i % len(words)]) for i in range(50)
    ]
    queries: list[Content] = [(f"{words[i % 13]} {words[(5 * i + 2) % 13]}",) for i in range(20)]
    chats = [[{"role": "user", "content": parts(each)}] for each in (*pages, *queries)]
    found = vectors(embedder.post("/v1/embeddings", {"messages": chats}))
    expected = [author.embedding(each) for each in (*pages, *queries)]
    check(found, expected)
    ours = found[50:] @ found[:50].T
    theirs = np.stack(expected[50:]) @ np.stack(expected[:50]).T
    assert np.abs(ours - theirs).max() < 1e-5
    order = np.argsort(-ours, axis=1)
    ranked = np.take_along_axis(theirs, order, axis=1)
    assert (np.diff(ranked, axis=1) < 1e-6).all(), "the same ranking but for equals"


@pytest.mark.slow
def test_coheres_sdk_is_answered(embedder: Server, ranker: Server) -> None:
    cohere = pytest.importorskip("cohere")
    with httpx.Client(timeout=60) as http:
        client = cohere.ClientV2(api_key=KEY, base_url=embedder.url, httpx_client=http)
        model = http.get(f"{embedder.url}/v1/models", headers=WITH_KEY).json()["data"][0]["id"]
        told = client.embed(
            model=model,
            input_type="search_document",
            texts=list(TEXTS),
            embedding_types=["float"],
        )
        assert np.array(told.embeddings.float_).shape == (len(TEXTS), 64)
        client = cohere.ClientV2(api_key=KEY, base_url=ranker.url, httpx_client=http)
        model = http.get(f"{ranker.url}/v1/models", headers=WITH_KEY).json()["data"][0]["id"]
        ranked = client.rerank(model=model, query="which is blue?", documents=list(TEXTS), top_n=2)
    scores = [each.relevance_score for each in ranked.results]
    assert len(scores) == 2 and scores[0] >= scores[1]


@pytest.mark.slow
def test_ranks_are_the_same_on_two_ranks_behind_a_router_with_an_encoder(
    checkpoint: Callable[..., Path], ranker: Server, tmp_path: Path
) -> None:
    model = checkpoint("qwen3_vl", pooling="rank")
    sent = [{"content": parts((picture(64, 64, seed=3000 + i), TEXTS[i % 4]))} for i in range(6)]
    asked = {"query": "which is blue?", "documents": sent}
    expected = ranker.post("/rerank", asked)["results"]
    for name in ("encoder", "language", "router"):
        (tmp_path / name).mkdir()
    with (
        serving(model, tmp_path / "encoder", *FLAGS, "--role", "encode") as encoder,
        serving(
            model,
            tmp_path / "language",
            *(*FLAGS, "--role", "language", "--encoders", encoder.url),
            *("--encoder-key", "key", "--tp-size", "2"),
        ) as language,
        routing([language], tmp_path / "router") as router,
    ):
        found = replace(router, key=KEY).post("/rerank", asked)["results"]
        assert encoder.metric("saccade_images_encoded_total") == 6
        assert language.metric("saccade_images_encoded_total") == 0
    assert [each["index"] for each in found] == [each["index"] for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=1e-4)
