"""Batches through OpenAI's SDK: every line is answered once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from saccade.api.stored_objects import Paging
from saccade.core.client import ANYBODY, Client
from saccade.core.options import ServerOptions
from saccade.core.settings import KeySettings
from saccade.plugins.batches.fields import BatchJob
from saccade.plugins.batches.store import BatchStore, BufferedBatch, InputLine, new_id, now
from saccade.plugins.files import BATCHES
from tests.helpers.served import Served, serving

SECONDS = 60
ALL = Paging(100, True, "")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ServerOptions(port=0, served_model_name=("demo",))) as found:
        yield found


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": f"say {number}"}]}
    asked = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions"}
    return {**asked, "body": body, **changes}


def upload(client: openai.OpenAI, lines: Sequence[Any]) -> str:
    text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
    return client.files.create(file=("input.jsonl", text.encode()), purpose="batch").id


def begin(client: openai.OpenAI, lines: Sequence[Any], **more: Any) -> str:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint="/v1/chat/completions",
        completion_window="24h",
        **more,
    ).id


def over(client: openai.OpenAI, id: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while (batch := client.batches.retrieve(id)).status not in (
        "completed",
        "failed",
        "cancelled",
        "expired",
    ):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def results(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(each) for each in client.files.content(file).text.splitlines()]


def test_every_line_has_its_answer_in_the_order_of_the_file(served: Served) -> None:
    client = served.openai
    lines = [line(number) for number in range(30)]
    batch = over(client, begin(client, [*lines[:20], "", *lines[20:]], metadata={"of": "a test"}))
    assert batch.status == "completed" and batch.metadata == {"of": "a test"}
    assert (batch.request_counts.total, batch.request_counts.completed) == (30, 30)
    found = results(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in lines]
    for each in found:
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    assert batch.error_file_id is None
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"
    assert client.batches.list().data[0].id == batch.id


def test_a_line_that_is_refused_stands_among_the_errors_and_harms_no_other(served: Served) -> None:
    client = served.openai
    lines = [
        line(0),
        line(1, body={"model": "nobody", "messages": [{"role": "user", "content": "?"}]}),
        line(2, body={"model": "demo", "messages": "?"}),
        line(3, body={**line(3)["body"], "stream": True}),
        line(4),
    ]
    batch = over(client, begin(client, lines))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
    good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert [each["custom_id"] for each in good] == ["line-0", "line-4"]
    assert [each["response"]["status_code"] for each in bad] == [404, 400, 400]
    params = [each["response"]["body"]["error"]["param"] for each in bad]
    assert params == ["model", "messages", "stream"]


@pytest.mark.first
@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{"], "invalid_json_line", 1),
        ([line(0), {**line(1), "custom_id": 7}], "invalid_json_line", 2),
        ([line(0), line(1), line(0)], "duplicate_custom_id", 3),
        ([line(0, url="/v1/completions")], "mismatched_url", 1),
        ([""], "empty_file", None),
        ([{**line(0), "method": "GET"}], "invalid_json_line", 1),
    ],
)
def test_a_file_with_a_fault_fails_before_any_line_is_asked(
    served: Served, lines: Sequence[Any], code: str, number: int | None
) -> None:
    batch = over(served.openai, begin(served.openai, lines))
    assert batch.status == "failed" and batch.output_file_id is None
    (fault,) = batch.errors.data
    assert (fault.code, fault.line) == (code, number)


@pytest.mark.more
def test_a_line_nested_as_deep_as_the_check_allows_has_its_result(served: Served) -> None:
    """The check's thread has more room on its stack than the event loop that asks the line."""
    client = served.openai
    for depth in range(1000, 940, -1):
        body = f'{{"model": "demo", "x": {"[" * depth}{"]" * depth}}}'
        asked = json.dumps(line(0, body=0)).replace('"body": 0', f'"body": {body}')
        batch = over(client, begin(client, [asked, line(1)]))
        if batch.status != "failed":
            break
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (refused,) = results(client, batch.error_file_id)
    assert refused["response"]["status_code"] == 400


def test_a_batch_that_is_not_kept_whole_stops_no_other(tmp_path: Path) -> None:
    """As seen between the making of its tables and its row, or after a kill there."""
    store = BatchStore(tmp_path)
    whole = BatchJob(
        id=new_id(), endpoint="/v1/completions", input_file_id="f", created_at=now(), expires_at=0
    )
    store.add_batch(whole, ANYBODY, None)
    begun = new_id()
    with closing(sqlite3.connect(tmp_path / f"{begun}.db")) as rows:
        rows.execute("CREATE TABLE batch (described, owner, lifetime, cancelled)")
    assert store.open_batches(["demo"]) == [(whole.id, "")]
    assert [each.id for each in store.page("", ALL)] == [whole.id]
    with store.hold_batch(begun) as held:
        assert held is None


def test_a_batch_of_another_model_in_the_same_folder_is_left_to_its_server(served: Served) -> None:
    store = BatchStore(served.front.intake.media.files_folder / BATCHES)
    input = upload(served.openai, [line(0)])
    other = BatchJob(
        id=new_id(),
        endpoint="/v1/chat/completions",
        input_file_id=input,
        created_at=1,
        expires_at=now() + 60,
        model="another",
    )
    store.add_batch(other, ANYBODY, None)
    batch = over(served.openai, begin(served.openai, [line(1)]))
    assert (batch.model, batch.status) == ("demo", "completed")
    found = served.openai.batches.retrieve(other.id)
    assert (found.model, found.status) == ("another", "validating")
    assert served.openai.batches.cancel(other.id).status == "cancelling"
    assert store.open_batches(["another"]) == [(other.id, "")]


def test_what_is_no_batch_is_refused_by_name(served: Served) -> None:
    create: Any = served.openai.batches.create
    with pytest.raises(openai.NotFoundError):
        create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        create(input_file_id="file-x", endpoint="/v1/images", completion_window="24h")
    for path in ("batch_x", "..%2f..", "batch_" + "0" * 32):
        assert served.http.get(f"/v1/batches/{path}").status_code == 404


@pytest.mark.more
def test_a_cancelled_batch_keeps_what_was_answered(served: Served) -> None:
    client = served.openai
    held = threading.Event()
    answered, reply = [0], served.engine.reply

    def slowly(request: Any) -> Any:
        answered[0] += 1
        if answered[0] > 3:
            held.set()
            time.sleep(0.05)
        return reply(request)

    served.engine.reply = slowly
    try:
        id = begin(client, [line(number) for number in range(200)])
        assert held.wait(SECONDS)
        assert client.batches.cancel(id).status == "cancelling"
        batch = over(client, id)
    finally:
        served.engine.reply = reply
    assert batch.status == "cancelled"
    done = batch.request_counts.completed
    assert 3 <= done < 200 and len(results(client, batch.output_file_id)) == done


def test_one_key_sees_nothing_of_anothers(served: Served) -> None:
    id = begin(served.openai, [line(0)])
    over(served.openai, id)
    store = BatchStore(served.front.intake.media.files_folder / BATCHES)
    assert store.find_batch(id, "").id == id
    assert not store.page("somebody", ALL)


@pytest.mark.more
def test_a_batch_goes_on_where_a_killed_server_left_it(served: Served, tmp_path: Path) -> None:
    """As the next server finds it: half of the lines are answered."""
    client = served.openai
    lines = [line(number) for number in range(10)]
    id = over(client, begin(client, lines)).id
    store = BatchStore(served.front.intake.media.files_folder / BATCHES)
    # A copy of it, bent back to the state in which a server has died.
    before = served.front.metrics.value("saccade_batch_lines_total", outcome="answer")
    left = f"batch_{'f' * 32}"
    copy = tmp_path / f"{left}.db"
    with closing(sqlite3.connect(store.folder / f"{id}.db")) as rows:
        rows.execute("VACUUM INTO ?", (str(copy),))
    with closing(sqlite3.connect(copy, isolation_level=None)) as rows:
        (described,) = rows.execute("SELECT described FROM batch").fetchone()
        batch = json.loads(described)
        batch |= {"id": left, "status": "in_progress", "output_file_id": None}
        rows.execute("UPDATE batch SET described = ?", (json.dumps(batch).encode(),))
        start = 0
        for number, each in enumerate(lines, 1):
            length = len(json.dumps(each))
            result = json.dumps({"custom_id": each["custom_id"], "old": True}).encode()
            answered, kept = (1, result) if number % 2 else (None, None)
            row = number, each["custom_id"], start, length, answered, kept
            rows.execute("INSERT INTO line VALUES (?, ?, ?, ?, ?, ?)", row)
            start += length + 1
    copy.rename(store.folder / copy.name)
    batch = over(client, left)
    after = served.front.metrics.value("saccade_batch_lines_total", outcome="answer")
    assert after - before == 5, "those that had an answer were not asked again"
    found = results(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in lines]
    assert [bool(each.get("old")) for each in found] == [True, False] * 5


def test_a_line_whose_result_is_not_kept_is_asked_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, failed = BufferedBatch.answer, [False]

    def once(self: BufferedBatch, number: int, answered: bool, result: bytes) -> None:
        if number == 2 and not failed[0]:
            failed[0] = True
            raise sqlite3.OperationalError("disk I/O error")
        keep(self, number, answered, result)

    monkeypatch.setattr(BufferedBatch, "answer", once)
    batch = over(served.openai, begin(served.openai, [line(number) for number in range(5)]))
    assert failed[0] and batch.status == "completed" and batch.request_counts.completed == 5
    assert len(results(served.openai, batch.output_file_id)) == 5


def test_a_batch_that_is_let_go_waits_for_who_still_writes(tmp_path: Path) -> None:
    """A cancelled task leaves its thread behind. sqlite3 ended the whole process there, on Python
    3.11.
    """
    store = BatchStore(tmp_path)
    ended: list[str] = []

    def write(held: BufferedBatch, begun: threading.Event) -> None:
        with pytest.raises(sqlite3.ProgrammingError) as caught:
            while True:
                held.answer(1, True, bytes(1 << 16))
                begun.set()
        ended.append(str(caught.value))

    for _ in range(20):
        id, begun = new_id(), threading.Event()
        batch = BatchJob(
            id=id, endpoint="/v1/responses", input_file_id="", created_at=now(), expires_at=now()
        )
        store.add_batch(batch, ANYBODY, None)
        with store.hold_batch(id) as held:
            assert held is not None
            held.add_lines([InputLine(1, "a", 0, 0)])
            thread = threading.Thread(target=write, args=(held, begun))
            thread.start()
            assert begun.wait(10)
        thread.join(10)
    assert len(ended) == 20 and all("closed database" in each for each in ended)


def test_a_batch_that_the_disk_does_not_take_is_refused_and_leaves_nothing() -> None:
    with serving(ServerOptions(port=0, served_model_name=("demo",))) as served:
        input_file = upload(served.openai, [line(0)])
        folder = served.front.intake.media.files_folder / BATCHES
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        folder.write_text("in the way")
        refused = served.http.post("/v1/batches", json={"input_file_id": input_file, **asked})
        assert refused.status_code == 507
        assert refused.json()["error"]["code"] == "insufficient_storage"
        folder.unlink()
        again = served.http.post("/v1/batches", json={"input_file_id": input_file, **asked})
        assert over(served.openai, again.json()["id"]).request_counts.completed == 1
        assert len(served.http.get("/v1/batches").json()["data"]) == 1


def kept(store: BatchStore, owner: str, made: int, status: str = "completed") -> str:
    """The id of a batch of an owner's."""
    batch = BatchJob(
        id=new_id(), endpoint="/v1/responses", input_file_id="", created_at=made, expires_at=now()
    )
    batch.status = status  # type: ignore[assignment]
    store.add_batch(batch, Client(owner), None)
    return batch.id


def test_a_list_opens_the_batches_of_its_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever they are of, and in a folder of an earlier run, where each is read once."""
    before = BatchStore(tmp_path)
    mine = [kept(before, "me", made) for made in range(12)]
    for made in range(20):
        kept(before, "you", made)
    store, opened = BatchStore(tmp_path), list[str]()
    connect = sqlite3.connect

    def noted(path: Path, **more: Any) -> sqlite3.Connection:
        if Path(path).parent == store.folder:  # a server in this process has its own batches
            opened.append(Path(path).stem)
        return connect(path, **more)

    monkeypatch.setattr(sqlite3, "connect", noted)
    pages = [[each.id for each in store.page("me", Paging(1, True, ""))] for _ in range(2)]
    assert pages == [[mine[11], mine[10]]] * 2
    assert len(opened) == 32 + 2 + 2, "all once, then the page and one more"
    opened.clear()
    found = store.page("me", Paging(3, False, mine[4]))
    assert [each.id for each in found] == mine[5:9] == opened
    opened.clear()
    assert store.page("nobody", ALL) == [] and opened == []
    fresh = kept(store, "me", 50)
    opened.clear()
    assert [each.id for each in store.page("me", Paging(1, True, ""))] == [fresh, mine[11]]
    assert len(opened) == 3, "the new one is read once, too"
    elsewhere = kept(before, "me", 60)
    assert store.page("me", Paging(1, True, ""))[0].id == elsewhere, "of another server"
    before._forget(elsewhere)
    assert store.page("me", Paging(1, True, ""))[0].id == fresh
    opened.clear()
    kept(store, "me", 70, "in_progress")
    assert len(opened) <= 1 + 13, "a new batch opens its own, and once those not known to be over"
    opened.clear()
    kept(store, "me", 80)
    assert len(opened) <= 1 + 2


def test_lists_that_hang_hold_up_their_client_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: others list and upload, and the event loop's own threads, which read pictures,
    are free.
    """
    hang, begun, hung = threading.Event(), threading.Event(), list[str]()
    page, most = BatchStore.page, min(32, (os.cpu_count() or 1) + 4) + 2

    def slow(self: BatchStore, owner: str, paging: Paging) -> list[BatchJob]:
        if owner == "one":
            hung.append(owner)
            begun.set()
            assert hang.wait(SECONDS)
        return page(self, owner, paging)

    async def in_thread() -> int:
        return await asyncio.to_thread(lambda: 7)

    monkeypatch.setattr(BatchStore, "page", slow)
    keys = tmp_path / "keys"
    keys.write_text("one:first\ntwo:second\n")
    options = ServerOptions(port=0, served_model_name=("demo",))
    with (
        serving(options, extras=(KeySettings(str(keys)),)) as served,
        ThreadPoolExecutor(most) as threads,
    ):
        one = openai.OpenAI(base_url=served.openai.base_url, api_key="first", timeout=SECONDS * 2)
        two = one.with_options(api_key="second")
        lists = [threads.submit(one.batches.list) for _ in range(most)]
        try:
            assert begun.wait(SECONDS)
            found = asyncio.run_coroutine_threadsafe(in_thread(), served.loop)
            assert found.result(SECONDS) == 7
            made = begin(two, [line(0)])
            assert [each.id for each in two.batches.list().data] == [made]
            assert over(two, made).status == "completed"
            assert len(hung) == 1 and not any(each.done() for each in lists)
        finally:
            hang.set()
        assert all(each.result().data == [] for each in lists)
    assert len(hung) == most
