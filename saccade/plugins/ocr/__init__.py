"""`saccade ocr`: converts pages of PDFs and images to Markdown."""

from saccade.plugin import Command, Plugin

PLUGIN = Plugin(
    "ocr",
    commands=(
        Command(
            "ocr",
            "saccade.plugins.ocr.command:app",
            "Convert the pages of PDFs and images to Markdown.",
        ),
    ),
)
