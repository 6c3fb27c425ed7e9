"""PDFs of a few kB that take minutes of CPU time to render."""

from __future__ import annotations

import threading
import time

import httpx

from saccade_bench.abuse import attack
from saccade_bench.fixtures.pdf import Sheet, assembled, pdf, stream
from saccade_bench.image_files import data_url


def nested(pages: int, times: int, depth: int = 2) -> bytes:
    """Return a PDF with the same page many times, which draws nested forms."""
    kids = "3 0 R " * pages
    objects = {1: b"<< /Type /Catalog /Pages 2 0 R >>"}
    objects[2] = f"<< /Type /Pages /Kids [{kids}] /Count {pages} >>".encode()
    told = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents 4 0 R"
    objects[3] = f"{told} /Resources << /XObject << /X 5 0 R >> >> >>".encode()
    objects[4] = stream(b"/X Do " * times)
    form = "/Type /XObject /Subtype /Form /BBox [0 0 99 99]"
    for number in range(5, 5 + depth):
        inner = f"/Resources << /XObject << /X {number + 1} 0 R >> >>"
        objects[number] = stream(b"/X Do " * times, f"{form} {inner}")
    objects[5 + depth] = stream(b"0 0 m 99 99 l S", form)
    return assembled(objects)


def masked(draws: int) -> bytes:
    """Return a PDF page that draws a form many times, each through a luminosity mask."""
    told = (
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources "
        "<< /ExtGState << /G 5 0 R >> /XObject << /X 6 0 R >> >> >>"
    )
    form = "/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Group << /S /Transparency >>"
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        3: told.encode(),
        4: stream(b"/G gs /X Do " * draws),
        5: b"<< /Type /ExtGState /SMask << /S /Luminosity /G 6 0 R >> >>",
        6: stream(b"1 0 0 rg 0 0 612 792 re f", form),
    }
    return assembled(objects)


def ask(url: str, data: bytes, client: str) -> str:
    """Ask about a PDF as the tenant `client`. Return the status and the duration."""
    told = data_url(data, "application/pdf")
    part = {"type": "file", "file": {"file_data": told, "max_pixels": 64 * 64}}
    body = {
        "model": "demo",
        "max_tokens": 1,
        "cache_salt": client,
        "messages": [{"role": "user", "content": [part]}],
    }
    begun = time.monotonic()
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    return f"{answer.status_code} after {time.monotonic() - begun:.1f} s"


def beside(url: str, hostile: list[bytes]) -> str:
    """Send hostile PDFs, and a page of another client at the same time. Describe the outcomes."""
    told: list[str] = []
    threads = [
        threading.Thread(target=lambda data=data: told.append(ask(url, data, "one")))
        for data in hostile
    ]
    for thread in threads:
        thread.start()
    time.sleep(3.0)  # until they are being rendered
    other = ask(url, pdf([Sheet(["a page"])]), "other")
    for thread in threads:
        thread.join()
    return f"{', '.join(told)}; another client's page {other}"


@attack("three PDFs of forms in forms")
def forms(url: str) -> str:
    return beside(url, [nested(5 + number, 60) for number in range(3)])


@attack("three PDFs of 2,000 luminosity masks")
def luminosity_masks(url: str) -> str:
    return beside(url, [masked(2000 + number) for number in range(3)])
