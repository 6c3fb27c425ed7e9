"""What a package index shows of Saccade and `pyproject.toml` cannot say: README.md with links that
work there, and the project's addresses. All else is in `pyproject.toml`.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HOME = "https://saccade.example"
"""Where the project is published. To be replaced once it has a host."""
SOURCE = f"{HOME}/source/"
"""The folder of the files that README.md links to."""
RELATIVE = re.compile(r"(\]\(|src=\"|href=\")(?![a-z]+:|#)")
README = Path(__file__).with_name("README.md")


def absolute_links(text: str) -> str:
    """Return Markdown whose relative links and images lead to the project's source."""
    return RELATIVE.sub(rf"\g<1>{SOURCE}", text)


if __name__ == "__main__":
    setup(
        long_description=absolute_links(README.read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        url=HOME,
        project_urls={
            "Documentation": f"{SOURCE}docs/index.md",
            "Changelog": f"{SOURCE}CHANGELOG.md",
            "Source": SOURCE,
        },
    )
