"""Words that ranks leave for each other in torch's store, where no exchange may be relied upon: one is missing, or may be.

Unlike an agreement, nobody has to come: who reads finds what was written, or nothing.
"""

from __future__ import annotations

from hf_zero.comm.groups import torch_groups


class Notes:
    """One rank's key for each of the others, under a subject of theirs.

    Args:
        subject: what the notes are about; the same on these ranks, and nowhere else in the program.

    Every method raises a `RuntimeError` if the process that keeps the store is gone, and a `ValueError` if the program's
    process group is.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def write(self, by: object, text: str) -> None:
        """Leave a note, in place of an older one.

        Args:
            by: the rank, or what else tells the notes of one subject apart.
            text: the note.
        """
        torch_groups.program_store().set(self._key(by), text)

    def read(self, by: object) -> str | None:
        """A note, or None if there is none. It does not wait, as the store's own `get` does."""
        store, key = torch_groups.program_store(), self._key(by)
        return store.get(key).decode() if store.check([key]) else None

    def count(self, what: str, amount: int) -> int:
        """Add to a number that all ranks count together; returns it as it is then."""
        return int(torch_groups.program_store().add(self._key(what), amount))

    def remove(self, by: object) -> None:
        """Take a note back."""
        torch_groups.program_store().delete_key(self._key(by))

    def _key(self, by: object) -> str:
        return f"hf_zero {self._subject} {by}"
