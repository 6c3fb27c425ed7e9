"""The command `saccade ocr`."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from cyclopts.types import ExistingFile

app = App(name="ocr")


@app.default
def ocr(
    files: tuple[ExistingFile, ...],
    /,
    *,
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    output: Path | None = None,
    pages: str | None = None,
    prompt: str | None = None,
    task: str | None = None,
    no_repeat_ngram: int | None = None,
    max_tokens: int | None = None,
    concurrency: int = 8,
) -> int:
    """Convert the pages of PDFs and images to Markdown.

    The status is 0 if every page was converted whole. A page that fails costs no other page. With
    --output, an interrupted command continues where it stopped if you type it again.

    Parameters
    ----------
    files:
        PDF, PNG, JPEG, WebP or TIFF files.
    model:
        The model to load, as for saccade serve, or the URL of a server. With --base-url, the
        server's name for the model.
    base_url:
        Ask this server (for example http://127.0.0.1:8000, with or without /v1) instead of loading
        a model. PDFs need a server of Saccade. Images need any OpenAI-compatible server.
    api_key:
        The server's key.
    output:
        Write the Markdown to this file, and pages done so far beside it. Default: print it.
    pages:
        The pages of each file, such as 1-5,8,12-. Default: all.
    prompt:
        What to ask about each page. Default: the model's published prompt, or a general one.
    task:
        The model's published prompt for something else than text, such as table or formula.
    no_repeat_ngram:
        The answer repeats no sequence of so many tokens within its last tokens. 0 allows it.
        Default: as published for the model.
    max_tokens:
        Maximum length of a page's text in tokens. Default: 4096, or half of the context.
    concurrency:
        How many pages are read at once.
    """
    from saccade.plugins.ocr.run import OcrJob
    from saccade.plugins.ocr.run import ocr as read_pages

    if base_url is None and model is not None and model.startswith(("http://", "https://")):
        base_url, model = model, None
    job = OcrJob(files, output, pages, prompt, no_repeat_ngram, max_tokens, concurrency, task)
    return read_pages(job, model, base_url, api_key)
