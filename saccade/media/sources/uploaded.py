"""The interface for uploaded files, to which requests refer by id or by digest."""

from __future__ import annotations

from typing import Protocol


class Upload(Protocol):
    """An uploaded file."""

    @property
    def nbytes(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """The blake3 hash of the content."""
        ...


class UploadedFiles(Protocol):
    """The files that clients have uploaded.

    owner: the name of a client's API key.
    """

    async def find(self, id: str, owner: str = "") -> Upload:
        """Return the upload with this id.

        Raises NotFound if there is none, or if it belongs to another owner.
        """
        ...

    async def find_content(self, name: str, owner: str = "") -> str | None:
        """Return the id of an upload with this content, or None.

        name: the digest of the content, as "blake3-DIGEST".
        """
        ...

    async def read(self, id: str, owner: str = "") -> bytes:
        """Return the content of an upload. Raises NotFound."""
        ...

    def close(self) -> None:
        """Stop the threads that read and write files."""
