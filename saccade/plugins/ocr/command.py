"""Defines the command `saccade ocr`."""

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

    The exit status is 0 if every page was converted completely. If a page fails, the others are
    still converted. With --output, you can repeat an interrupted command to resume it.

    Parameters
    ----------
    files:
        PDF, PNG, JPEG, WebP or TIFF files.
    model:
        The model to load, as for saccade serve, or the URL of a server. With --base-url, the
        server's name for the model.
    base_url:
        Use this server (for example http://127.0.0.1:8000, with or without /v1) instead of loading
        a model. PDFs require a Saccade server. For images, it can be any OpenAI-compatible server.
    api_key:
        The server's API key.
    output:
        Write the Markdown to this file. Finished pages are saved next to it. Default: print it.
    pages:
        The pages of each file, such as 1-5,8,12-. Default: all.
    prompt:
        The prompt for each page. Default: the model's published prompt, or a general one.
    task:
        Use the model's published prompt for this task instead of text, such as table or formula.
    no_repeat_ngram:
        Do not repeat sequences of this many tokens among the recent tokens of a page. 0 allows it.
        Default: as published for the model.
    max_tokens:
        Maximum length of a page's text in tokens. Default: 4096, or half of the context.
    concurrency:
        Maximum number of pages that are read at once.
    """
    from saccade.plugins.ocr.run import OcrJob
    from saccade.plugins.ocr.run import ocr as read_pages

    if base_url is None and model is not None and model.startswith(("http://", "https://")):
        base_url, model = model, None
    job = OcrJob(files, output, pages, prompt, no_repeat_ngram, max_tokens, concurrency, task)
    return read_pages(job, model, base_url, api_key)
