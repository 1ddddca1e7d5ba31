"""Which rank computes which expert, and where it has it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.engine.parameters.experts import Routes


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_a_rank_computes_the_chunks_that_it_gathers(ranks: int, same: int, size: int) -> None:
    chunks = ranks * same
    routes = Routes(chunks * size, ranks, chunks)
    experts = torch.arange(chunks * size)
    for rank in range(ranks):
        gathered = torch.cat([experts[chunk * size :][:size] for chunk in range(rank, chunks, ranks)])
        places = routes.places(gathered)
        assert torch.equal(places, rank * routes.num_local + torch.arange(routes.num_local))


def test_what_is_no_expert_has_the_place_behind_all() -> None:
    assert Routes(4, 2, 2).places(torch.tensor([-1, 0, 3, 4, 9])).tolist() == [4, 0, 3, 4, 4]
