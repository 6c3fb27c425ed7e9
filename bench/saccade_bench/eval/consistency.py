"""Consistency of a server's answers when the same questions are asked cold, warm, batched, and next
to long prompts.

Greedy answers must be the same text in all passes. This is guaranteed in float32. In bfloat16, a
different batch may round differently. In a cold pass, the PNGs have a new comment: their bytes are
new to the server, but not their pixels. Long prompts in the same batch make a server split the
questions' prefill into different chunks.
"""

from __future__ import annotations

import base64
import copy
import threading
import uuid
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from saccade_bench.eval.contract import (
    EvalMessage,
    EvalResult,
    GradedAnswer,
    Item,
    Progress,
    SampleError,
    Sampler,
    append,
    summarise,
)
from saccade_bench.image_files import data_url

LONG_PROMPT = "Count from one to nine hundred, then stop. " * 60
PNG_HEADER_END = 33  # bytes: signature and the IHDR chunk
PASSES = ("warm", "batched", "beside long prompts")


def consistency(
    items: Sequence[Item],
    sampler: Sampler,
    concurrency: int,
    journal: Path | None = None,
    told: Progress | None = None,
) -> EvalResult:
    """Return the fraction of answers that equal the cold ones. The groups are the passes.

    A failed request counts as a difference. Every comparison is appended to `journal`, which is not
    read.
    """
    first, second, third = (uuid.uuid4().hex for _ in range(3))
    cold = _ask_all(items, sampler, first, 1)
    answers = _compare("warm", items, cold, _ask_all(items, sampler, first, 1), told)
    answers += _compare("batched", items, cold, _ask_all(items, sampler, second, concurrency), told)
    with _long_prompts(sampler):
        answers += _compare(
            "beside long prompts", items, cold, _ask_all(items, sampler, third, concurrency), told
        )
    if journal:
        for answer in answers:
            append(journal, asdict(answer))
    return summarise("consistency", answers)


def _ask_all(
    items: Sequence[Item], sampler: Sampler, mark: str, concurrency: int
) -> list[str | SampleError]:
    def ask(item: Item) -> str | SampleError:
        try:
            return sampler(marked(item.messages(), mark))
        except SampleError as error:
            return error

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, items))


def _compare(
    name: str,
    items: Sequence[Item],
    cold: Sequence[str | SampleError],
    now: Sequence[str | SampleError],
    told: Progress | None,
) -> list[GradedAnswer]:
    answers = []
    for item, before, after in zip(items, cold, now, strict=True):
        failed = next(
            (str(text) for text in (before, after) if isinstance(text, SampleError)), None
        )
        same = failed is None and before == after
        answers.append(
            GradedAnswer(
                f"{item.id}: {name}",
                name,
                str(before),
                "" if failed else str(after),
                float(same),
                failed,
            )
        )
        if told:
            told(answers[-1])
    return answers


@contextmanager
def _long_prompts(sampler: Sampler) -> Iterator[None]:
    """Keep one long text request running until the context exits."""
    stop = threading.Event()

    def keep_asking() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                sampler([{"role": "user", "content": f"{number}. {LONG_PROMPT}"}])
            except SampleError:
                return  # too long for this model: the pass is then a second batched one

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def marked(messages: list[EvalMessage], mark: str) -> list[EvalMessage]:
    """Return the messages with `mark` as a comment in every PNG."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            url = part.get("image_url", {}).get("url", "")
            if url.startswith("data:image/png;base64,"):
                encoded = base64.b64decode(url.partition(",")[2])
                part["image_url"] = {"url": data_url(mark_png(encoded, mark))}
    return messages


def mark_png(encoded: bytes, mark: str) -> bytes:
    """Return a PNG with the same pixels and different bytes, by adding a tEXt chunk after the
    header (PNG specification, 11.3.4.3).
    """
    body = b"tEXtComment\x00" + mark.encode("latin-1")
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return encoded[:PNG_HEADER_END] + chunk + encoded[PNG_HEADER_END:]
