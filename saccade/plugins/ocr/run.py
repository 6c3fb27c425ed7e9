"""Implements `saccade ocr`: converts pages of PDFs and images to Markdown, several at once, in
order.

If a page fails, the others are still read.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from saccade.core.errors import ConfigError, SaccadeError, StartupError
from saccade.core.given_paths import check_given, sendable, shown
from saccade.ipc.own_server import free_port, own_server, wait_until_ready
from saccade.plugins.ocr.client import PageReader, ServerGone, Uploaded, connection, find_model
from saccade.plugins.ocr.done_pages import DonePages, ReadPage, beside, done_pages, write_whole
from saccade.plugins.ocr.files import GivenFile, PageRange, chosen, look, page_ranges
from saccade.plugins.ocr.page_prompts import asked, check_task
from saccade.tools.server import root

INTERRUPTED = 130
MAX_AT_ONCE = 256
LAST_LINES = 15
_FENCED = re.compile(r"```(?:markdown|md)?\n(.*)\n```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class OcrJob:
    """The pages to read, and the options. A value of `None` is replaced with the one published for
    the model.

    output: the output file, or `None` for standard output.
    """

    files: tuple[Path, ...]
    output: Path | None = None
    pages: str | None = None
    prompt: str | None = None
    ngram: int | None = None
    max_tokens: int | None = None
    concurrency: int = 8
    task: str | None = None

    def check(self) -> None:
        """Raise ConfigError for invalid options, before a model is loaded."""
        page_ranges(self.pages)
        check_task(self.task, self.prompt)
        asked("", self.prompt, self.ngram)
        if not 1 <= self.concurrency <= MAX_AT_ONCE:
            raise ConfigError(f"--concurrency {self.concurrency}: expected 1 to {MAX_AT_ONCE}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens}: expected at least 1")
        if self.output is None:
            return
        check_given("--output", str(self.output))
        if self.output.resolve() in {each.resolve() for each in self.files}:
            raise ConfigError(f"--output {shown(self.output)} is one of the files to read")


def ocr(job: OcrJob, model: str | None, base_url: str | None, api_key: str | None) -> int:
    """Read all pages with a running server, or with one that is started for `model`.

    Returns 0 if every page was read completely. Raises SaccadeError if none can be read.
    """
    job.check()
    console = Console(stderr=True)
    output = None if job.output is None else job.output.resolve()
    with done_pages(output) as kept:
        run = _Run(job, kept, console)
        try:
            if base_url is not None:
                asyncio.run(run.read_all(root(base_url), model, api_key))
            else:
                with _served(model, console) as address:
                    asyncio.run(run.read_all(address, None, None))
        except KeyboardInterrupt:
            console.print(f"\nstopped{run.to_go_on()}", soft_wrap=True)
            return INTERRUPTED
        except ServerGone as error:
            raise ServerGone(f"{error}{run.to_go_on()}") from None
        return run.finish(output)


@contextmanager
def _served(model: str | None, console: Console) -> Iterator[str]:
    """Start a server for a model, and yield its URL. Raises SaccadeError if it exits first."""
    if model is None:
        raise ConfigError("select a model with --model, or a running server with --base-url")
    port = free_port()
    words = (model, "--port", str(port))
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as printed, own_server(*words, output=printed) as server:
        try:
            with console.status(f"loading {escape(sendable(model))} ..."):
                wait_until_ready(address, server)
            yield address
        except (StartupError, ServerGone) as error:
            printed.seek(0)
            lines = printed.read().decode(errors="replace").splitlines()
            raise ServerGone("\n".join((f"{error}:", *lines[-LAST_LINES:]))) from None


@dataclass(slots=True)
class _Outcome:
    """The result of a page. If the page failed, `read` is `None` and `why` is the reason."""

    title: str
    read: ReadPage | None = None
    why: str = ""


@dataclass(slots=True)
class _Counts:
    """Counts of the pages that were read and reused, and of tokens."""

    asked: int = 0
    found: int = 0
    prompt: int = 0
    cached: int = 0
    answer: int = 0
    begun: float = field(default_factory=time.monotonic)


class _Run:
    """One run over all files. `outcomes` has an entry for each page, in the order of the output."""

    def __init__(self, job: OcrJob, kept: DonePages, console: Console) -> None:
        self.outcomes: list[_Outcome | None] = []
        self._job = job
        self._kept = kept
        self._console = console
        self._counts = _Counts()
        self._printed = 0
        self._permits = asyncio.Semaphore(job.concurrency)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal or (job.output is None and sys.stdout.isatty()),
        )
        self._task = self._bar.add_task("pages", total=0)

    async def read_all(self, address: str, model: str | None, api_key: str | None) -> None:
        """Read the pages of all files. Raises ConfigError and ServerGone."""
        ranges = page_ranges(self._job.pages)
        async with connection(api_key, self._job.concurrency) as http:
            served = await find_model(http, address, model)
            prompt = asked(served.name, self._job.prompt, self._job.ngram, self._job.task)
            self._counts = _Counts()
            try:
                async with PageReader(
                    http, address, served, prompt, self._job.max_tokens
                ) as reader:
                    with self._bar:
                        async with asyncio.TaskGroup() as group:
                            for path in self._job.files:
                                await self._begin(path, ranges, reader, group)
            except* ServerGone as gone:
                raise gone.exceptions[0] from None

    async def _begin(
        self,
        path: Path,
        ranges: Sequence[PageRange],
        reader: PageReader,
        group: asyncio.TaskGroup,
    ) -> None:
        """Start reading a file's pages, with at most `concurrency` in progress."""
        try:
            file, data = await asyncio.to_thread(look, path)
            uploaded = await reader.upload(path, data) if file.is_pdf else None
            del data
            count = file.pictures if uploaded is None else uploaded.pages
            numbers = chosen(ranges, count)
        except ServerGone:
            raise
        except SaccadeError as error:
            self._end(self._place(), _Outcome(_shown(path.name), why=str(error)))
            return
        places = [self._place() for _ in numbers]
        for place, number in zip(places, numbers, strict=True):
            page = _Page(file, uploaded, number, count != 1)
            name = page.name(reader)
            if (found := self._kept.find(name, reader.max_tokens)) is not None:
                self._counts.found += 1
                self._end(place, _Outcome(page.title, found))
                continue
            await self._permits.acquire()
            group.create_task(self._read(place, page, name, reader))

    def _place(self) -> int:
        self.outcomes.append(None)
        self._bar.update(self._task, total=len(self.outcomes))
        return len(self.outcomes) - 1

    async def _read(self, place: int, page: _Page, name: str, reader: PageReader) -> None:
        try:
            answer = await reader.read(*await page.shown())
        except ServerGone:
            raise
        except SaccadeError as error:
            self._end(place, _Outcome(page.title, why=str(error)))
        else:
            counts = self._counts
            counts.asked += 1
            counts.prompt += answer.prompt_tokens
            counts.cached += answer.cached_tokens
            counts.answer += answer.answer_tokens
            read = ReadPage(name, unfenced(answer.text), answer.whole, reader.max_tokens)
            self._kept.add(read)
            self._end(place, _Outcome(page.title, read))
        finally:
            self._permits.release()

    def _end(self, place: int, outcome: _Outcome) -> None:
        """Record the result of a page, and print all pages that are next in order."""
        self.outcomes[place] = outcome
        self._bar.advance(self._task)
        if outcome.read is None:
            self._tell(f"[red]error:[/red] {escape(outcome.title)}: {escape(outcome.why)}")
        elif not outcome.read.whole:
            most = f"its text ends after {outcome.read.max_tokens} tokens"
            self._tell(f"[yellow]cut:[/yellow] {escape(outcome.title)}: {most} (--max-tokens)")
        while self._job.output is None and self._printed < len(self.outcomes):
            if (next := self.outcomes[self._printed]) is None:
                return
            sys.stdout.write(sendable(block(next.title, next.read, next.why)))
            sys.stdout.flush()
            self._printed += 1

    def _tell(self, words: str) -> None:
        self._console.print(sendable(words), highlight=False, soft_wrap=True)

    def to_go_on(self) -> str:
        """Return a message on how many pages are stored, and how to resume."""
        if self._job.output is None:
            return ""
        done = sum(each is not None and each.read is not None for each in self.outcomes)
        return f": {_pages(done)} kept in {beside(self._job.output)}; the same command goes on"

    def finish(self, output: Path | None) -> int:
        """Write the output, print a summary, and return the exit status."""
        outcomes = [each for each in self.outcomes if each is not None]
        failed = sum(each.read is None for each in outcomes)
        cut = sum(each.read is not None and not each.read.whole for each in outcomes)
        if output is not None:
            write_whole(
                output, "".join(block(each.title, each.read, each.why) for each in outcomes)
            )
            if not failed and not cut:
                beside(output).unlink(missing_ok=True)
        counts = self._counts
        seconds = time.monotonic() - counts.begun
        words = [f"{_pages(len(outcomes))} in {seconds:.1f} s"]
        words += [f"{counts.asked / seconds:.2f} pages/s"] if counts.asked else []
        words += [f"{counts.found} kept from before"] if counts.found else []
        words += [f"{failed} failed"] if failed else []
        words += [f"{cut} cut"] if cut else []
        words += [f"{counts.cached} of {counts.prompt} prompt tokens cached"]
        self._tell(", ".join((*words, f"{counts.answer} answer tokens")))
        return 1 if failed or cut else 0


@dataclass(frozen=True, slots=True)
class _Page:
    file: GivenFile
    uploaded: Uploaded | None
    number: int
    among: bool

    @property
    def title(self) -> str:
        name = _shown(self.file.path.name)
        return f"{name}, page {self.number}" if self.among else name

    def name(self, reader: PageReader) -> str:
        """Return a hash of everything that the text of the page depends on."""
        facts = (self.file.digest, self.number, reader.model, asdict(reader.prompt))
        return blake3(json.dumps(facts).encode()).hexdigest()

    async def shown(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the page as a message part, and the fields to add to its request."""
        if self.uploaded is not None:
            return self.uploaded.page(self.number)
        return await asyncio.to_thread(self.file.picture, self.number), {}


def block(title: str, read: ReadPage | None, why: str) -> str:
    """Return a page as it is written to the output, after a comment with its title."""
    words = title if read is not None else f"{title}: {why}"
    if read is not None and not read.whole:
        words += f", cut after {read.max_tokens} tokens"
    comment = " ".join(words.replace("--", "- -").replace(">", "").split())
    text = "" if read is None else f"\n{read.text.strip()}\n"
    return f"<!-- {comment} -->\n{text}\n"


def unfenced(text: str) -> str:
    """Remove a code fence around the whole text, which general models often add, and return the
    text.
    """
    found = _FENCED.fullmatch(text.strip())
    return found[1] if found and "```" not in found[1] else text


def _shown(name: str) -> str:
    return shown(sendable(name))


def _pages(count: int) -> str:
    return f"{count} page{'s' * (count != 1)}"
