"""The socket for uploaded files, which requests name by id or by digest."""

from __future__ import annotations

from typing import Protocol


class Upload(Protocol):
    """One upload."""

    @property
    def nbytes(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """Return the blake3 hash of the content."""
        ...


class UploadedFiles(Protocol):
    """The files that clients have uploaded. `owner` is the name of a client's key."""

    async def find(self, id: str, owner: str = "") -> Upload:
        """Return an owner's upload. Raises NotFound."""
        ...

    async def find_content(self, name: str, owner: str = "") -> str | None:
        """Return the id of an owner's upload of the content named "blake3-DIGEST"."""
        ...

    async def read(self, id: str, owner: str = "") -> bytes:
        """Return the content of an owner's upload. Raises NotFound."""
        ...

    def close(self) -> None:
        """End the threads that read and write."""
