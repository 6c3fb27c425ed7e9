"""The API's own description: what generators of clients need of it, and examples that work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from saccade.api.chat.fields import Reply
from saccade.api.field_words import COMMON
from saccade.core.field_docs import field_docs
from saccade.core.settings import ParallelSettings
from saccade.core.types import MAX_BIAS, MAX_STOP_CHARACTERS, MAX_STOPS
from saccade.plugins import plugins
from saccade.plugins.docs import openapi
from saccade.plugins.docs.openapi import classes_in, describe, descriptions
from saccade.plugins.route.options import RouteOptions, SpreadOptions
from tests.helpers.served import Served


def values(value: Any) -> Iterator[dict[str, Any]]:
    """Every object within."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from values(each)
    elif isinstance(value, list):
        for each in value:
            yield from values(each)


DOCUMENT = describe(plugins())
DESCRIPTIONS = descriptions(plugins())
BODIES: dict[str, Any] = {
    operation.path: operation.example
    for description in DESCRIPTIONS
    for operation in description.operations
    if operation.body
}
OPERATIONS = [
    (path, method, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def test_every_operation_has_a_name_a_group_and_a_summary() -> None:
    assert len({operation["operationId"] for *_, operation in OPERATIONS}) == len(OPERATIONS)
    for path, method, operation in OPERATIONS:
        assert operation["tags"] and operation["summary"], (method, path)
    assert DOCUMENT["servers"]


def test_every_parameter_of_a_path_is_defined_and_no_other() -> None:
    for path, method, operation in OPERATIONS:
        named = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path)), (method, path)


def test_lists_have_items_and_values_stay_apart_as_names() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for each in values(schemas):
        assert each.get("type") != "array" or "items" in each, each
        if isinstance(choices := each.get("enum"), list):
            names = {re.sub(r"\W", "_", str(choice)).lower() for choice in choices}
            assert len(names) == len(choices), choices
            assert not any(isinstance(choice, bool) for choice in choices), choices


def test_what_can_stream_says_so() -> None:
    streams = {
        path
        for path, _, operation in OPERATIONS
        if "text/event-stream" in operation["responses"]["200"].get("content", {})
    }
    assert streams == {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    }


def described() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every field of the document: the schema that it is of, its name, its own schema."""
    document = DOCUMENT
    for schema, shape in {**document["components"]["schemas"], "paths": document["paths"]}.items():
        for each in values(shape):
            for name, field in each.get("properties", {}).items():
                yield schema, name, field


def test_every_field_has_a_description_of_its_own() -> None:
    fields = list(described())
    assert len({name for _, name, _ in fields}) > 150
    for schema, name, field in fields:
        words = field.get("description", "")
        assert words.endswith(".") and words.strip(" .").lower() != name, (schema, name)


def test_what_it_describes_is_looked_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec would do so itself, beside threads that decode."""
    looked_up: list[type] = []

    def described(types: list[type], **how: Any) -> Any:
        assert not {*classes_in(types).values()} - {*classes_in(looked_up).values()}
        described_after.append(len(looked_up))
        return described_by_msgspec(types, **how)

    described_after: list[int] = []
    described_by_msgspec = msgspec.json.schema_components
    monkeypatch.setattr(openapi, "json_decoder", looked_up.append)
    monkeypatch.setattr(msgspec.json, "schema_components", described)
    describe.__wrapped__(plugins())
    assert described_after == [len(looked_up)] and looked_up


def test_no_sentence_is_of_a_field_that_is_not_there() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    words = dict(COMMON)
    for description in DESCRIPTIONS:
        for schema, name in description.own_words:
            assert name in schemas[schema]["properties"], (schema, name)
        assert not words.keys() & description.words, "these are common words"
        words |= description.words
    told = {name for _, name, field in described() if field["description"] == words.get(name)}
    assert set(words) == told


def test_words_below_a_field_are_those_of_its_class_and_its_bases() -> None:
    assert field_docs(ParallelSettings)["tp_size"].startswith("Tensor parallelism: processes (on")
    assert field_docs(RouteOptions).keys() > field_docs(SpreadOptions).keys() > {"max_requests"}
    described = DOCUMENT["components"]["schemas"]["Reply"]["properties"]["n"]["description"]
    assert described == field_docs(Reply)["n"]


def bounds_of(field: dict[str, Any]) -> Iterator[tuple[float, float]]:
    for option in field.get("anyOf", [field]):
        if {"minimum", "maximum"} <= option.keys():
            yield option["minimum"], option["maximum"]


def test_a_bound_in_words_is_the_bound_that_is_checked() -> None:
    for schema, name, field in described():
        words = field["description"]
        for low, high in bounds_of(field):
            for number in map(int, re.findall(r"\bat most (\d+)", words)):
                assert number == high, (schema, name, words)
            for first, last in re.findall(r"\bfrom (-?\d+) to (-?\d+)", words):
                assert (int(first), int(last)) == (low, high), (schema, name, words)
            for number in map(int, re.findall(r"(?:^|; |and )(-?\d+)(?: and -?\d+)?: ", words)):
                assert low <= number <= high, (schema, name, words)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop", ["x" * (MAX_STOP_CHARACTERS + 1)]),
        ("logit_bias", {"7": MAX_BIAS + 1}),
    ],
)
def test_what_the_words_forbid_is_refused_by_name(
    served: Served, path: str, field: str, value: object
) -> None:
    answer = served.http.post(path, json={**BODIES[path], field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


REFUSED = {
    "/v1/batches": "file_not_found",
    "/v1/rerank": "unsupported_model",
    "/v1/score": "unsupported_model",
    "/v1/load_lora_adapter": "too_many_adapters",
    "/v1/unload_lora_adapter": "model_not_found",
}
"""Codes of errors of examples that name files that are not there, or need another model."""


def test_each_body_of_an_example_is_answered(served: Served) -> None:
    posts = {path for path, method, operation in OPERATIONS if "requestBody" in operation}
    assert set(BODIES) == posts - {"/v1/files"}
    for path, body in BODIES.items():
        if "weights" in path or "memory" in path:  # e2e/test_weights.py, e2e/test_sleep.py
            continue
        answer = served.http.post(path, json=body)
        if path in REFUSED:
            assert answer.json()["error"]["code"] == REFUSED[path], path
            continue
        assert answer.status_code == 200, (path, answer.text)


def test_a_server_describes_the_plugins_that_it_has() -> None:
    some = tuple(plugin for plugin in plugins() if plugin.name in ("docs", "messages"))
    document = describe(some)
    paths = document["paths"].keys()
    assert {"/docs", "/v1/messages", "/v1/chat/completions"} <= paths
    assert not {"/v1/responses", "/v1/files"} & paths
    named = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert named <= document["components"]["schemas"].keys()


def test_each_operation_with_a_body_shows_its_example() -> None:
    for path, method, operation in OPERATIONS:
        for media in operation.get("requestBody", {}).get("content", {}).values():
            assert path == "/v1/files" or media["example"] == BODIES[path], (method, path)
