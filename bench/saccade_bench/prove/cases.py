"""The cases to try on a server: each asks a few questions and judges the answers.

Three kinds of evidence show that images were mixed up. The answer has the number of another image.
More of the prompt is cached than for an image that was never sent. Or the answer's
log-probabilities are identical to the log-probabilities of another image. A case is "not judged" if
the model cannot read its images, or if the server rejects its fields. In the last try, all images
are sent even so, because `cold.py` compares the answers of a model that cannot read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import httpx

from saccade_bench.prove import pictures
from saccade_bench.prove.client import (
    QUESTION,
    Asker,
    JudgedAnswer,
    Refused,
    data_url,
    says,
    url_of,
)
from saccade_bench.prove.pictures import NumberImage, plain

Verdict = Literal["kept apart", "MIXED UP", "not judged"]
Ask = Callable[[NumberImage], Awaitable[JudgedAnswer]]
SECOND = "What is the number in picture 2?"
ABREAST = 8
TRIES = 5
FEW_PIXELS = 64 * 64
ABORTS = (0.02, 0.1, 0.4)  # seconds: before, during and after the prefill of an image
PART_PIXELS = pictures.WIDTH * pictures.HEIGHT
LONG_AGO = 365 * 86_400
LONG_QUESTION = "Look at the picture with care, for others are like it. " * 60 + QUESTION
"""Some hundred tokens, after which the prefix cache of a hybrid model stores a state."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of a case. `why` describes the evidence."""

    verdict: Verdict
    why: str


APART = Finding("kept apart", "")


@dataclass(slots=True)
class Trial:
    """The environment of a case.

    numbers: numbers that no other case uses.
    many: number of images in the case "many".
    host: this machine's address, for images that the server fetches.
    told: called after each answer in the case "many".
    restart: restarts the server. None: it cannot be restarted.
    last: whether the case is not tried again.
    """

    requester: Asker
    numbers: Iterator[str]
    many: int
    host: str
    told: Callable[[], None]
    restart: Callable[[], None] | None = None
    last: bool = False

    def number(self) -> str:
        return next(self.numbers)


@dataclass(frozen=True, slots=True)
class TwinCase:
    """A case. `differs` describes how its images differ, which a faulty cache might ignore."""

    name: str
    differs: str
    run: Callable[[Trial], Awaitable[Finding]]


async def never_seen(
    trial: Trial, head: NumberImage, control: NumberImage, **extra: Any
) -> JudgedAnswer:
    """Return the answer about `control`, an image that was never sent.

    `head` is asked about first, so that the start of the prompt is as cached as in the answers that
    are compared with this one.
    """
    await trial.requester.ask([head], **extra)
    return await trial.requester.ask([control], **extra)


async def twins(
    trial: Trial, control: NumberImage, first: NumberImage, second: NumberImage
) -> Finding:
    """Compare two images with different content. `control` is encoded like `second`, with another
    number.
    """
    ask, head = trial.requester.ask, plain(trial.number())
    fresh = await never_seen(trial, head, control)
    if says(fresh.text, head.number):
        return _mixed(f"asked about {control.number}, it says {fresh.text!r}")
    is_read = says(fresh.text, control.number)
    if not (is_read or trial.last):
        return _unread(control, fresh)
    before, after = await ask([first]), await ask([second])
    again = await ask([first])
    if first.number and says(after.text, first.number):
        return _mixed(f"asked about {second.number or 'the second'}, it says {after.text!r}")
    if second.number and says(again.text, second.number):
        return _mixed(f"asked about {first.number or 'the first'} again, it says {again.text!r}")
    if not is_read:
        return _unread(control, fresh)
    if (witness := _cached(after, fresh, again)) is not None:
        return witness
    if second.number and not says(after.text, second.number):
        if after.text == before.text:
            return _mixed(f"both answers are {after.text!r}; the second shows {second.number}")
        return _unread(second, after)
    return APART


async def alike(
    trial: Trial, control: NumberImage, first: NumberImage, second: NumberImage
) -> Finding:
    """Compare images that look the same to any model, by cached tokens and log-probabilities."""
    ask = trial.requester.ask
    fresh = await never_seen(trial, plain(trial.number()), control)
    await ask([first])
    seen = await ask([first])
    other = await ask([second])
    still = await ask([first])
    if (witness := _cached(other, fresh, seen)) is not None:
        return witness
    if other.cached is not None and seen.cached is not None and other.cached < seen.cached:
        return APART  # the server did not reuse the first image's cache entries for the second
    if seen.scores is None or seen.scores != still.scores:
        return Finding("not judged", "the server's figures do not tell")
    if other.scores == seen.scores:
        return Finding("not judged", "equal log-probabilities, and no count of cached tokens")
    return APART


def _cached(
    answer: JudgedAnswer, fresh: JudgedAnswer, seen: JudgedAnswer | None = None
) -> Finding | None:
    """Return a finding if more of the prompt was cached than for an image that was never sent.

    If `seen` (an image that was sent before) is set, as much must be cached as for that one,
    because images may share their first tiles.
    """
    if answer.cached is None or fresh.cached is None or answer.cached <= fresh.cached:
        return None
    if seen is not None and _left(answer) > _left(seen):
        return None
    return _mixed(
        f"{answer.cached} tokens of its prompt were cached, {fresh.cached} of an image's that was "
        "never seen"
    )


def _left(answer: JudgedAnswer) -> int:
    """Return the number of prompt tokens that were not cached."""
    return (answer.prompt or 0) - (answer.cached or 0)


def _mixed(why: str) -> Finding:
    return Finding("MIXED UP", why)


def _unread(shown: NumberImage, answer: JudgedAnswer) -> Finding:
    return Finding(
        "not judged", f"the model does not read such an image ({shown.number}: {answer.text!r})"
    )


def _pair(
    make: Callable[[str, str], tuple[NumberImage, NumberImage]],
) -> Callable[[Trial], Awaitable[Finding]]:
    """Return a case with two images that show different numbers."""

    async def run(trial: Trial) -> Finding:
        control, _ = make(trial.number(), trial.number())
        return await twins(trial, control, *make(trial.number(), trial.number()))

    return run


def _invisible(
    make: Callable[[str], tuple[NumberImage, NumberImage]],
) -> Callable[[Trial], Awaitable[Finding]]:
    async def run(trial: Trial) -> Finding:
        control, _ = make(trial.number())
        return await alike(trial, control, *make(trial.number()))

    return run


def _plain(one: str, other: str) -> tuple[NumberImage, NumberImage]:
    return plain(one), plain(other)


async def turned(trial: Trial) -> Finding:
    _, control = pictures.turns(trial.number())
    return await twins(trial, control, *pictures.turns(trial.number()))


async def shaped(trial: Trial) -> Finding:
    return await twins(trial, plain(trial.number()), *pictures.shapes(trial.number()))


async def swapped(trial: Trial) -> Finding:
    """Compare the same two images in both orders."""
    one, other = plain(trial.number()), plain(trial.number())
    return await _second(trial, [one, other], [other, one], [one, other])


async def adjacent(trial: Trial) -> Finding:
    """Compare two images of one size, after the same first image of that size."""
    first, one, other = (plain(trial.number()) for _ in range(3))
    return await _second(trial, [first, one], [first, other], [first, one])


async def _second(trial: Trial, *prompts: list[NumberImage]) -> Finding:
    """Ask about the second image of each prompt, which must not be taken for any other."""
    known = {image.number for shown in prompts for image in shown}
    unread: Finding | None = None
    for shown in prompts:
        asked = shown[1]
        answer = await trial.requester.ask(shown, SECOND)
        for number in known - {asked.number}:
            if says(answer.text, number):
                return _mixed(f"picture 2 shows {asked.number}, and it says {answer.text!r}")
        if not says(answer.text, asked.number):
            unread = unread or _unread(asked, answer)
    return unread or APART


async def brief(trial: Trial) -> Finding:
    """Compare files whose short checksums and hashes are equal."""
    for name in pictures.SHORT_KEYS:
        one, other = pictures.colliding(name, trial.number(), trial.number())
        found = await alternate(trial.requester.ask_one, one, other)
        if found.verdict == "MIXED UP":
            return _mixed(f"files with the same 32 bits of {name}: {found.why}")
        if found != APART:
            return found
    return APART


async def tooled(trial: Trial) -> Finding:
    """Compare two images that a tool returned."""
    called = {"name": "look", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": called}

    async def say(returned: Any, question: str = QUESTION) -> JudgedAnswer:
        asked = {"role": "user", "content": [{"type": "text", "text": question}]}
        return await trial.requester.chat(
            [
                asked,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": returned},
                asked,
            ]
        )

    async def ask(image: NumberImage) -> JudgedAnswer:
        return await say([{"type": "image_url", "image_url": {"url": url_of(image)}}])

    with_image = await ask(plain(trial.number()))
    longer = await say(".", f"{QUESTION}?")
    if with_image.prompt and longer.prompt and with_image.prompt <= longer.prompt:
        return Finding("not judged", "a tool's image adds no prompt tokens, so it is not shown")
    return await unlike(ask, [plain(trial.number()) for _ in range(4)])


async def aborted(trial: Trial) -> Finding:
    """Abort requests about one image at several times, and ask about another."""
    for seconds in ABORTS:
        one, other = plain(trial.number()), plain(trial.number())
        await trial.requester.abort(one, seconds)
        found = await alternate(trial.requester.ask_one, other, one)
        if found != APART:
            return found
    return APART


async def restarted(trial: Trial) -> Finding:
    """Ask about two images, restart the server, and ask about these and one that was never sent.

    The new image comes first: keys that begin again with each start belong to images on disk.
    """
    if trial.restart is None:
        return Finding("not judged", "there is no --restart-command")
    new, one, other = (plain(trial.number()) for _ in range(3))
    for image in (one, other, one):  # some servers store only what was used again
        await trial.requester.ask_one(image)
    trial.restart()
    await trial.requester.ready()
    unread: Finding | None = None
    for shown in (new, one, other):
        answer = await trial.requester.ask_one(shown)
        for wrong in {new.number, one.number, other.number} - {shown.number}:
            if says(answer.text, wrong):
                return _mixed(f"asked about {shown.number}, it says {answer.text!r}")
        if not says(answer.text, shown.number):
            unread = unread or _unread(shown, answer)
    return unread or APART


async def alternate(ask: Ask, one: NumberImage, other: NumberImage) -> Finding:
    """Ask about two images in turns. No answer may have the other's number."""
    unread: Finding | None = None
    for shown, wrong in ((one, other), (other, one), (one, other)):
        answer = await ask(shown)
        if says(answer.text, wrong.number):
            return _mixed(f"asked about {shown.number}, it says {answer.text!r}")
        if not says(answer.text, shown.number):
            unread = unread or _unread(shown, answer)
    return unread or APART


async def parted(trial: Trial) -> Finding:
    """Compare two regions of one image."""

    async def half(sheet: NumberImage, x: int) -> JudgedAnswer:
        corners = [x * pictures.WIDTH, 0, (x + 1) * pictures.WIDTH, pictures.HEIGHT]
        image = {"url": url_of(sheet), "region": corners}
        part = {"type": "image_url", "image_url": image}
        return await trial.requester.say([part, {"type": "text", "text": QUESTION}])

    one, two = (pictures.beside(trial.number(), trial.number()) for _ in range(2))
    whole, control = await trial.requester.ask([one]), await half(two, 0)
    if control.prompt is None or control.prompt == whole.prompt:
        return Finding("not judged", "the server does not heed region")
    left, right = trial.number(), trial.number()
    sheet = pictures.beside(left, right)
    unread: Finding | None = None
    for number, other, x in ((left, right, 0), (right, left, 1), (left, right, 0)):
        answer = await half(sheet, x)
        if says(answer.text, other):
            return _mixed(f"the part shows {number}, and it says {answer.text!r}")
        if not says(answer.text, number):
            unread = unread or _unread(plain(number), answer)
    return unread or APART


async def paged(trial: Trial) -> Finding:
    """Compare regions of the pages of one PDF."""

    async def part(file: bytes, page: int, x: int) -> JudgedAnswer:
        data = data_url(file, "application/pdf")
        corners = [x * pictures.WIDTH, 0, (x + 1) * pictures.WIDTH, pictures.HEIGHT]
        shown = {"page": page, "region": corners, "max_pixels": PART_PIXELS}
        part = {"type": "file", "file": {"file_data": data, **shown}}
        return await trial.requester.say([part, {"type": "text", "text": QUESTION}])

    with suppress(Refused):
        await part(pictures.pages([(trial.number(), trial.number())]), 1, 2)
        return Finding("not judged", "the server does not heed region")
    drawn = [(trial.number(), trial.number()) for _ in range(2)]
    file = pictures.pages(drawn)
    unread: Finding | None = None
    for page, x in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
        shown = drawn[page][x]
        answer = await part(file, page + 1, x)
        for other in (number for both in drawn for number in both if number != shown):
            if says(answer.text, other):
                return _mixed(f"the part shows {shown}, and it says {answer.text!r}")
        if not says(answer.text, shown):
            unread = unread or _unread(plain(shown), answer)
    return unread or APART


async def limited(trial: Trial) -> Finding:
    """Compare an image at full size and with a lower max_pixels."""
    ask, limits = trial.requester.ask, {"max_pixels": FEW_PIXELS}
    control, shown = plain(trial.number()), plain(trial.number())
    small = await ask([control], mm_processor_kwargs=limits)
    whole = await ask([shown])
    limited = await ask([shown], mm_processor_kwargs=limits)
    again = await ask([shown])
    if small.prompt is None or small.prompt == whole.prompt:
        return Finding("not judged", "the server does not heed mm_processor_kwargs.max_pixels")
    if (limited.prompt, again.prompt) != (small.prompt, whole.prompt):
        return _mixed(
            f"prompts of {limited.prompt} and {again.prompt} tokens; of images never seen "
            f"{small.prompt} and {whole.prompt}"
        )
    return APART


async def salted(trial: Trial) -> Finding:
    """Compare the same image for two tenants."""
    ask, shown = trial.requester.ask, plain(trial.number())
    head, control = plain(trial.number()), plain(trial.number())
    await ask([shown], cache_salt="prove one")
    mine = await ask([shown], cache_salt="prove one")
    fresh = await never_seen(trial, head, control, cache_salt="prove two")
    theirs = await ask([shown], cache_salt="prove two")
    if not mine.cached or fresh.cached is None:
        return Finding("not judged", "the server does not say what was cached")
    return _cached(theirs, fresh) or APART


async def adapted(trial: Trial) -> Finding:
    """Compare the same image for two models of one server, such as a model and its adapter.

    The second model's log-probabilities must equal those for the same pixels in another file.
    """
    ask, shown = trial.requester.ask, plain(trial.number())
    other = await trial.requester.other_model()
    if other is None:
        return Finding("not judged", "the server names one model only")
    head, control = plain(trial.number()), plain(trial.number())
    fresh = await never_seen(trial, head, control, model=other)
    base, answer = await ask([shown]), await ask([shown], model=other)
    if (witness := _cached(answer, fresh)) is not None:
        return witness
    under_another = [
        (await ask([pictures.again(shown, f"{turn} {shown.number}")], model=other)).scores
        for turn in range(2)
    ]
    if answer.scores is None or under_another[0] != under_another[1]:
        return Finding("not judged", "the server's figures do not tell")
    if answer.scores != under_another[0]:
        return _mixed(f"{other}'s figures are not those of the same pixels under another name")
    if answer.scores == base.scores:
        return Finding("not judged", f"{other} has the figures of {trial.requester.model}")
    return APART


async def replaced(trial: Trial) -> Finding:
    """Compare two images that a URL returns one after the other."""
    return await _put_anew(trial)


async def changed(trial: Trial) -> Finding:
    """Compare two images that a URL returns one after the other with an old modification date and
    an ETag, but without an expiry time, so that heuristic caching would consider the first one
    fresh. Then do the same through a redirect.
    """
    for path in ("image.png", "moved"):
        found = await _put_anew(trial, path, tagged=True)
        if found != APART:
            return found
    return APART


async def queried(trial: Trial) -> Finding:
    """Compare the images of two URLs that differ in their queries."""
    one, other = plain(trial.number()), plain(trial.number())
    with _shelf(trial.host) as (url, put):
        put(one)
        put(other)

        async def ask(image: NumberImage) -> JudgedAnswer:
            return await trial.requester.ask([f"{url}?at={(one, other).index(image)}"])

        return await alternate(ask, one, other)


async def _put_anew(trial: Trial, path: str = "image.png", *, tagged: bool = False) -> Finding:
    one, other = plain(trial.number()), plain(trial.number())
    with _shelf(trial.host, tagged=tagged) as (url, put):
        url = url.replace("image.png", path)
        put(one)
        first = await trial.requester.ask([url])
        if not says(first.text, one.number):
            return _unread(one, first)
        put(other)
        second = await trial.requester.ask([url])
    if says(second.text, one.number):
        return _mixed(f"{other.number} lies at the URL by now, and it says {second.text!r}")
    return APART if says(second.text, other.number) else _unread(other, second)


async def claimed(trial: Trial) -> Finding:
    """Send two images with the same `uuid`. Then another tenant sends only the `uuid`, and a third
    image with it, and the first tenant only the `uuid`.
    """
    one, other = plain(trial.number()), plain(trial.number())
    name = f"prove-{one.number}-{other.number}"

    async def named(image: NumberImage | None, **extra: Any) -> JudgedAnswer:
        address = None if image is None else {"url": url_of(image)}
        part = {"type": "image_url", "image_url": address, "uuid": name}
        return await trial.requester.say([part, {"type": "text", "text": QUESTION}], **extra)

    async def owned(image: NumberImage | None) -> JudgedAnswer:
        return await named(image, cache_salt="prove one")

    first = await owned(one)
    if not says(first.text, one.number):
        return _unread(one, first)
    second = await owned(other)
    if says(second.text, one.number):
        return _mixed(f"{other.number} came with the name, and it says {second.text!r}")
    if not says(second.text, other.number):
        return _unread(other, second)
    claim = plain(trial.number())
    for image in (None, claim):
        with suppress(Refused):
            theirs = await named(image, cache_salt="prove two")
            for shown in (one, other):
                if says(theirs.text, shown.number):
                    return _mixed(f"another tenant is shown {shown.number}: {theirs.text!r}")
    with suppress(Refused):
        mine = await owned(None)
        if says(mine.text, claim.number):
            return _mixed(f"another tenant's {claim.number} is shown for the name: {mine.text!r}")
    return APART


async def behind(trial: Trial) -> Finding:
    """Compare two images before the same long text.

    Hybrid models cache states long after an image. If one is reused for another image, answers are
    about the wrong image.
    """

    async def ask(image: NumberImage) -> JudgedAnswer:
        return await trial.requester.ask([image], LONG_QUESTION)

    return await unlike(ask, [plain(trial.number()) for _ in range(4)])


async def tiled(trial: Trial) -> Finding:
    """Compare two screenshots that differ in one corner, and share all other tiles."""

    async def ask(image: NumberImage) -> JudgedAnswer:
        return await trial.requester.ask([image])

    return await unlike(ask, [pictures.screen(trial.number()) for _ in range(4)])


async def framed(trial: Trial) -> Finding:
    """Compare two videos that share their first frames, and differ in the last two."""
    first = plain(trial.number())

    async def ask(image: NumberImage) -> JudgedAnswer:
        frames = [url_of(frame) for frame in (first, first, image, image)]
        part = {"type": "video", "video": frames, "fps": 1}
        return await trial.requester.say([part, {"type": "text", "text": QUESTION}])

    return await unlike(ask, [plain(trial.number()) for _ in range(4)])


async def unlike(ask: Ask, shown: Sequence[NumberImage]) -> Finding:
    """Compare the first two images, by numbers, log-probabilities and cached tokens. The other two
    are a head and a control as in `never_seen`.

    This is also judged if the model cannot read the images.
    """
    one, other, *unrelated = shown
    fresh = [await ask(each) for each in unrelated][-1]
    before, again = await ask(one), await ask(one)
    after, last = await ask(other), await ask(one)
    for asked, answer, wrong in ((other, after, one), (one, last, other)):
        if says(answer.text, wrong.number):
            return _mixed(f"asked about {asked.number}, it says {answer.text!r}")
    if after.scores is not None and after.scores in (before.scores, again.scores):
        return _mixed(f"its figures for {other.number} are those for {one.number}")
    if (witness := _cached(after, fresh, again)) is not None:
        return witness
    if after.scores is None and not says(after.text, other.number):
        return _unread(other, after)
    return APART


async def filmed(trial: Trial) -> Finding:
    """Compare an image with a video of that one frame."""
    control, shown = plain(trial.number()), plain(trial.number())

    async def video(frame: NumberImage) -> JudgedAnswer:
        part = {"type": "video", "video": [url_of(frame)], "fps": 1}
        return await trial.requester.say([part, {"type": "text", "text": QUESTION}])

    await video(plain(trial.number()))  # as in `never_seen`
    fresh = await video(control)
    await trial.requester.ask([shown])
    answer = await video(shown)
    if answer.prompt != fresh.prompt:
        return _mixed(f"a prompt of {answer.prompt} tokens; of a frame never seen {fresh.prompt}")
    if (witness := _cached(answer, fresh)) is not None:
        return witness
    if not says(fresh.text, control.number):
        return _unread(control, fresh)
    return APART if says(answer.text, shown.number) else _unread(shown, answer)


async def many(trial: Trial) -> Finding:
    """Send many images, then again in another order, when the first may have been evicted."""
    shown = [plain(trial.number()) for _ in range(trial.many)]
    gate = asyncio.Semaphore(ABREAST)
    known = {each.number for each in shown}
    read = 0

    async def check(each: NumberImage) -> str | None:
        """Return which image the answer confuses with this one, or None."""
        nonlocal read
        async with gate:
            answer = await trial.requester.ask([each])
            trial.told()
        if says(answer.text, each.number):
            read += 1
            return None
        others = [number for number in known if says(answer.text, number)]
        if not others:
            return None
        async with gate:  # ask about the same pixels in another file, to rule out a misreading
            plainly = await trial.requester.ask([pictures.again(each, f"again {each.number}")])
        if says(plainly.text, others[0]):
            return None
        return f"the image of {each.number} is taken for that of {others[0]}"

    for order in (shown, shown[::-1]):
        faults = [fault for fault in await asyncio.gather(*map(check, order)) if fault]
        if faults:
            return _mixed(f"{len(faults)} of {len(shown)}: {faults[0]}")
    if read < len(shown):  # out of 2 * len(shown) answers
        return Finding("not judged", f"the model read {read} of {2 * len(shown)}")
    return APART


@contextmanager
def _shelf(host: str, tagged: bool = False) -> Iterator[tuple[str, Callable[[NumberImage], None]]]:
    """Serve images over HTTP. Yields the URL, and a function that replaces the image.

    If `tagged`, images are cacheable, with an ETag and a modification date, and the path "/moved"
    permanently redirects to the newest image.
    """
    lies: list[NumberImage] = []
    since = formatdate(time.time() - LONG_AGO, usegmt=True)

    class Shelf(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tag = f'"{len(lies)}"'
            if self.path == "/moved":
                self._answer(301, b"", {"location": f"/{len(lies)}.png", "last-modified": since})
            elif tagged and self.headers["if-none-match"] == tag:
                self._answer(304, b"", {"etag": tag})
            else:
                kept = {"etag": tag, "last-modified": since}
                headers = kept if tagged else {"cache-control": "no-store"}
                shown = lies[int(self.path.partition("?at=")[2] or -1)]
                self._answer(200, shown.encoded, {"content-type": shown.kind, **headers})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Shelf) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{host}:{server.server_port}/image.png", lies.append
        finally:
            server.shutdown()


CASES: Sequence[TwinCase] = (
    TwinCase("plain", "the number that is drawn", _pair(_plain)),
    TwinCase("palette", "the palette, not the pixels' data", _pair(pictures.palettes)),
    TwinCase("alpha", "transparency, not colours", _pair(pictures.alphas)),
    TwinCase("turn", "EXIF's orientation", turned),
    TwinCase("shape", "width and height, not the pixels' bytes", shaped),
    TwinCase("middle", "bytes after the first 16,384 and before the last", _pair(pictures.middles)),
    TwinCase("sampled", "all but each 16th byte", _pair(pictures.sampled)),
    TwinCase("pixel", "one pixel", _invisible(pictures.one_pixel)),
    TwinCase("last byte", "the file's last byte", _invisible(pictures.last_byte)),
    TwinCase("order", "the order of two images", swapped),
    TwinCase("adjacent", "the second of two images of one size", adjacent),
    TwinCase("short", "all but a checksum or hash of 32 bits", brief),
    TwinCase("tool", "the image that a tool returned", tooled),
    TwinCase("aborted", "an image, after an aborted request about another", aborted),
    TwinCase("limits", "max_pixels", limited),
    TwinCase("region", "the part that is shown of one image", parted),
    TwinCase("page", "the part that is shown of a PDF's pages", paged),
    TwinCase("tenant", "cache_salt", salted),
    TwinCase("adapter", "the model asked, of one server's several", adapted),
    TwinCase("url", "what lies at one URL", replaced),
    TwinCase("query", "the query of the images' URLs", queried),
    TwinCase("changed", "what lies at a URL that says nothing of freshness", changed),
    TwinCase("uuid", "a client's own name, sent with another image or by another", claimed),
    TwinCase("behind", "the image before the same long text (states of hybrids)", behind),
    TwinCase("tiles", "one corner of a screen", tiled),
    TwinCase("video", "an image, and a video of that one frame", filmed),
    TwinCase("frames", "the last frames of a video", framed),
    TwinCase("restart", "what was stored before a restart", restarted),
    TwinCase("many", "which of many images, at once and after eviction", many),
)


async def judge(case: TwinCase, trial: Trial) -> Finding:
    """Return a case's finding. It is "not judged" if the server rejects the requests or
    fails.

    If the model misreads the images, the case is retried with other numbers, up to `TRIES` times.
    """
    try:
        for attempt in range(1, TRIES + 1):
            trial.last = attempt == TRIES
            finding = await case.run(trial)
            if finding.verdict != "not judged" or case.run is many:
                break
    except Refused as error:
        finding = Finding("not judged", f"refused: {str(error)[:200]}")
    except httpx.TimeoutException:
        finding = Finding("not judged", "the server does not answer in time")
    except httpx.HTTPStatusError as error:
        answer = error.response
        finding = Finding("not judged", f"HTTP {answer.status_code}: {answer.text[:200]}")
    return finding
