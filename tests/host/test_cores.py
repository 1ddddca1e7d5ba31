"""Threads for what is done in host memory beside a device."""

import pytest
import torch

from hf_zero.host import cores as host_cores


@pytest.fixture
def eight_cores_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cores.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(host_cores.torch, "set_num_threads", _Threads.set)
    monkeypatch.setattr(host_cores.torch, "get_num_threads", _Threads.get)
    _Threads.number = 1


class _Threads:
    number = 1

    @classmethod
    def set(cls, number: int) -> None:
        cls.number = number

    @classmethod
    def get(cls) -> int:
        return cls.number


@pytest.mark.usefixtures("eight_cores_for_two")
def test_work_in_host_memory_takes_this_processs_share_of_the_cores_and_gives_it_back() -> None:
    with pytest.raises(ValueError, match="in the middle"), host_cores.on_all_cores():
        assert torch.get_num_threads() == 4
        raise ValueError("in the middle")
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("eight_cores_for_two")
def test_a_number_that_somebody_has_chosen_stays() -> None:
    _Threads.number = 3
    with host_cores.on_all_cores():
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("eight_cores_for_two")
def test_threads_are_given_back_where_a_step_has_raised_before() -> None:
    host_cores.begin(1)
    host_cores.begin(1)
    assert torch.get_num_threads() == 4
    host_cores.end(1)
    host_cores.end(1)
    assert torch.get_num_threads() == 1
