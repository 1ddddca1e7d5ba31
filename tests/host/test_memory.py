"""Rooms in host memory, and how much of it there is."""

import torch

from hf_zero.host import memory as host_memory


def test_rooms_lie_apart_and_keep_what_is_written() -> None:
    wanted = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((0, 2), torch.float32), ((), torch.float64)]
    made = host_memory.rooms(wanted, is_pinned=False)
    assert [(tuple(room.shape), room.dtype) for room in made] == wanted
    for number, room in enumerate(made):
        room.fill_(number)
    assert all((room == number).all() for number, room in enumerate(made))


def test_slabs_are_powers_of_two_and_no_larger_than_needed() -> None:
    gib = 2**30
    assert host_memory._slab_bytes([gib // 4, 10]) == gib // 2
    assert host_memory._slab_bytes([gib] * 7) == gib
    assert host_memory._slab_bytes([3 * gib, gib]) == 4 * gib


def test_some_memory_is_available() -> None:
    available = host_memory.available_bytes()
    assert available is None or available > 2**20
