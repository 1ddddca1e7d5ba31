"""Passes items from one thread to a reader in another, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

Item = tuple[str, Tensor]
Result = TypeVar("Result")


class Hand(Generic[Result]):
    """A reader in a thread of its own, which is given an item when it asks for one: so none waits in between.

    Args:
        read: gets an iterator over what is given.

    Attributes:
        result: what `read` has returned.
        error: what it has raised.
    """

    def __init__(self, read: Callable[[Iterator[Item]], Result]) -> None:
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._read = read
        self._turn = threading.Condition()
        self._item: Item | None = None
        self._is_asked, self._has_ended, self._is_closed = False, False, False
        self._reason: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hf_zero: reader of weights", daemon=True)
        self._thread.start()

    def give_all(self, items: Iterator[Item]) -> None:
        """Give the reader each of the items as it asks for it, until it has ended."""
        while self._wants_more():
            item = next(items, None)
            if item is None:
                return
            with self._turn:
                self._item, self._is_asked = item, False
                self._turn.notify_all()
            del item

    def close(self, reason: BaseException | None = None) -> None:
        """Tell the reader that there is no more, or why there is none, and wait until it has ended."""
        with self._turn:
            self._is_closed, self._reason = True, reason
            self._turn.notify_all()
        self._thread.join()

    def _wants_more(self) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: self._is_asked or self._has_ended)
            return not self._has_ended

    def _run(self) -> None:
        try:
            self.result = self._read(self._items())
        except BaseException as error:  # told where `close` is called
            self.error = error
        finally:
            with self._turn:
                self._has_ended, self._item = True, None
                self._turn.notify_all()

    def _items(self) -> Iterator[Item]:
        while True:
            with self._turn:
                self._is_asked = True
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._item is not None or self._is_closed)
                if self._item is None:
                    if self._reason is not None:
                        raise RuntimeError("the gathers have failed") from self._reason
                    return
                item, self._item = self._item, None
            yield item
            del item
