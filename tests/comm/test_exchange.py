"""The errors of exchanges."""

from __future__ import annotations

import logging
from unittest import mock

from hf_zero.comm import exchange
from hf_zero.comm.groups import torch_groups
from tests.ranks import on_ranks


@on_ranks(2, is_watched=[False, True])
def test_an_error_is_logged_at_once_where_torch_watches_a_device(is_watched: bool) -> None:
    assert not torch_groups.watches_a_device()  # gloo, whatever a tensor is on
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    exchange.logger.addHandler(handler)
    try:
        with mock.patch.object(torch_groups, "watches_a_device", lambda: is_watched):
            error = exchange.named(RuntimeError("Connection reset"), "gather of 'layers.0'", 1, 5.0)
    finally:
        exchange.logger.removeHandler(handler)
    assert "lost rank 1 in gather of 'layers.0'" in str(error)
    assert said == ([str(error)] if is_watched else [])


@on_ranks(2)
def test_a_lost_rank_and_a_late_one_are_told_apart() -> None:
    lost = exchange.told(RuntimeError("Connection reset"), "gather of 'layers.0'", 1, 5.0)
    late = exchange.told(RuntimeError("Timed out"), "gather of 'layers.0'", 1, 5.0)
    assert "error of rank 1" in lost and "memory" in lost and "timeout_s" not in lost
    assert "waited 5 s for rank 1" in late and "timeout_s" in late
