"""What is changed in other libraries is put back: in reverse order, and where it stood."""

import pytest

from hf_zero.changes import Changes, undo_all


class Base:
    def name(self) -> str:
        return "base"


class Derived(Base):
    def size(self) -> int:
        return 1

    def name_and_size(self) -> str:
        return f"{self.name()} {self.size()}"


def test_replaced_and_wrapped_methods_come_back_as_they_were() -> None:
    before = dict(vars(Derived))
    changes = Changes()
    assert not changes
    changes.wrap(Derived, "size", lambda original, self: original(self) + 1)
    changes.wrap(Derived, "size", lambda original, self: original(self) * 10)
    changes.replace(Derived, "name", lambda self: "derived")
    assert changes and Derived().name_and_size() == "derived 20"
    changes.undo()
    assert dict(vars(Derived)) == before and Derived().name_and_size() == "base 1"


def test_changes_of_a_block_end_with_it_also_after_an_error() -> None:
    with pytest.raises(KeyError), Changes() as changes:
        changes.replace(Derived, "size", lambda self: 2)
        raise KeyError
    assert Derived().size() == 1


def test_what_is_kept_is_undone_for_the_whole_program_and_can_be_made_again() -> None:
    changes, undone = Changes(), []
    for turn in range(2):
        changes.keep()
        changes.also(lambda turn=turn: undone.append(turn))
        undo_all()
    assert undone == [0, 1] and not changes


def test_what_others_put_there_since_stays() -> None:
    with Changes() as changes:
        changes.wrap(Derived, "size", lambda original, self: 7)
        theirs = lambda self: 8  # noqa: E731
        Derived.size, ours = theirs, Derived.size
    assert Derived.size is theirs and ours is not theirs
    del Derived.size
    Derived.size = lambda self: 1
