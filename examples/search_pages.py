"""Search a folder of PDFs: embed each page, find the best one for a sentence, and ask a question
about it, with the unchanged openai SDK.

    saccade serve Qwen/Qwen3-VL-Embedding-2B --port 8001      # or any model with --pooling last
    saccade serve Qwen/Qwen3-VL-2B-Instruct --port 8000       # may be the same server as above
    python examples/search_pages.py FOLDER "costs of 2024" "Sum?" --embed-base-url http://127.0.0.1:8001

Without a folder, a few PDFs are generated. Everything is requested twice, and the server's counters
show that the second time, nothing is rendered or encoded. Needs openai, numpy, pillow, pypdfium2.
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pypdfium2
from PIL import Image, ImageDraw, ImageFont

REPORTS = {
    "garden.pdf": ["A garden in spring", "Red tulips: 120", "Blue irises: 45"],
    "costs.pdf": ["Costs of 2024", "Rent: 3100", "Paper: 270"],
    "staff.pdf": ["People and teams", "Kitchen: 7", "Office: 12"],
}
COUNTED = ("saccade_images_encoded_total", "saccade_pages_rendered_total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("sentence", nargs="?", default="what the rent was in 2024")
    parser.add_argument("question", nargs="?", default="What is on this page?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of who answers")
    parser.add_argument("--embed-base-url", help="of who embeds; none: the same server")
    parser.add_argument("--key", default="none")
    parser.add_argument("--max-pixels", type=int, default=1_000_000, help="of a page")
    given = parser.parse_args()
    given.answer_at = given.base_url.rstrip("/").removesuffix("/v1")
    given.embed_at = (given.embed_base_url or given.base_url).rstrip("/").removesuffix("/v1")
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or draw(Path(made))
        pages = [
            (f"{file.name}, page {number}", part)
            for file in sorted(folder.glob("*.pdf"))
            for number, part in enumerate(parts(file, given.max_pixels), 1)
        ]
        for time in ("first", "second"):
            before = counts(given)
            name, answer = search(given, pages)
            encoded, drawn = (now - then for now, then in zip(counts(given), before, strict=True))
            print(f"{time} time: {name}: {answer!r}; {encoded:.0f} encoded, {drawn:.0f} drawn")


def search(given: argparse.Namespace, pages: list[tuple[str, dict[str, Any]]]) -> tuple[str, str]:
    """Return the name of the best page, and the answer to the question about it."""
    embedder = openai.OpenAI(base_url=f"{given.embed_at}/v1", api_key=given.key)
    model = embedder.models.list().data[0].id

    def embed(*content: dict[str, Any]) -> list[float]:
        body = {"messages": [{"role": "user", "content": content}], "model": model}
        told: Any = embedder.post("/embeddings", body=body, cast_to=object)
        return list(told["data"][0]["embedding"])

    query = embed({"type": "text", "text": given.sentence})
    scores = np.array([embed(part) for _, part in pages]) @ np.array(query)
    name, part = pages[int(scores.argmax())]
    answerer = openai.OpenAI(base_url=f"{given.answer_at}/v1", api_key=given.key)
    content: list[Any] = [part, {"type": "text", "text": given.question}]
    answer = answerer.chat.completions.create(
        model=answerer.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_tokens=64,
    )
    return name, answer.choices[0].message.content or ""


def parts(path: Path, max_pixels: int) -> list[dict[str, Any]]:
    """Return each page of a file as a separate PDF, which the server renders and caches."""
    whole, found = pypdfium2.PdfDocument(path), []
    for index in range(len(whole)):
        alone, file = pypdfium2.PdfDocument.new(), io.BytesIO()
        alone.import_pages(whole, [index])
        alone.save(file)
        url = f"data:application/pdf;base64,{base64.b64encode(file.getvalue()).decode()}"
        found.append({"type": "file", "file": {"file_data": url, "max_pixels": max_pixels}})
    return found


def counts(given: argparse.Namespace) -> list[float]:
    """Return the sum of the counters over all servers."""
    total = dict.fromkeys(COUNTED, 0.0)
    for url in {given.embed_at, given.answer_at}:
        headers = {"Authorization": f"Bearer {given.key}"}
        answer = httpx.get(f"{url}/metrics", headers=headers).raise_for_status()
        for line in answer.text.splitlines():
            name, _, value = line.partition(" ")
            if name in total:
                total[name] += float(value)
    return list(total.values())


def draw(folder: Path) -> Path:
    """Create some PDFs with a page for each line."""
    for name, lines in REPORTS.items():
        pages = []
        for line in lines:
            page = Image.new("RGB", (420, 300), "white")
            ImageDraw.Draw(page).text((24, 120), line, "black", ImageFont.load_default(32))
            pages.append(page)
        pages[0].save(folder / name, save_all=True, append_images=pages[1:])
    return folder


if __name__ == "__main__":
    try:
        main()
    except (openai.APIConnectionError, httpx.ConnectError) as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
