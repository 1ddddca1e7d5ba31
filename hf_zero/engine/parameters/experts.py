"""Expert parallelism: which experts a rank computes, and what it gathers of their weights.

[Note: experts] A weight of all experts, [experts, ...], is at rest as any other: cut by rows, on its first dim, over all ranks
that parameters are cut over. So files, optimizers, norms and checkpoints know nothing of expert parallelism. With `ep_size: P`
on N of these ranks, rank r has the r-th of N equal *chunks* of experts. It computes with its own chunk, and with those of the
ranks `same_experts` (r modulo P), which it gathers; no others. Tokens for other experts it sends to the ranks `experts`, and
gets those of its own from them. With 8 experts, N = 4 and P = 2:

    rank 0 has experts 0 1, rank 1 has 2 3, rank 2 has 4 5, rank 3 has 6 7
    ranks 0 and 2 compute 0 1 4 5, ranks 1 and 3 compute 2 3 6 7

With `tp_size: T`, the ranks of the tensor axis divide the experts first, see [Note: shared experts], and P / T of the N ranks
that cut a place's experts divide them as above.

The gradient of what a rank computes with is of the tokens of all its `experts`; added up over `same_experts`, and over the
replicas, it is of all tokens. It is divided as that of any other weight, by the number of ranks that see different batches.

Source: GShard (arXiv:2006.16668), DeepSpeed-MoE (arXiv:2201.05596).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.layout import RowLayout

_MARK = "_zero_experts"


def mark_experts(module: nn.Module) -> None:
    """Let the parameters of a module, each of all its experts, be gathered for the experts that a rank computes alone."""
    vars(module)[_MARK] = True


def are_experts(module: nn.Module) -> bool:
    """Whether a module has been marked."""
    return bool(vars(module).get(_MARK))


def is_of_experts(holders: Sequence[tuple[nn.Module, str]]) -> bool:
    """Whether a parameter that these modules hold has been marked."""
    return any(are_experts(module) for module, _ in holders)


@contextmanager
def so_many_experts(module: nn.Module, count: int) -> Iterator[None]:
    """Within: a module believes that it has so many experts."""
    before = module.num_experts
    module.num_experts = count  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_experts = before


@dataclass(frozen=True)
class Computed:
    """What modules compute with of one parameter, and how it is cut.

    Attributes:
        layout: of what is gathered.
        rank: this rank's place in it.
        is_part: it is not the whole parameter, but that of some experts.
    """

    layout: RowLayout
    rank: int
    is_part: bool = False

    @classmethod
    def by(cls, holders: Sequence[tuple[nn.Module, str]], param: Tensor, world: World) -> Computed:
        """What these modules compute with of `param`."""
        layout = world.layout_of(param)
        if world.experts.num_ranks == 1 or not is_of_experts(holders):
            return cls(layout, world.shard_rank)
        assert layout.dim == 0 and layout.num_ranks == world.num_shards and layout.padding == 1, tuple(param.shape)
        part = (layout.shape[0] // world.experts.num_ranks, *layout.shape[1:])
        return cls(RowLayout(part, world.same_experts.num_ranks), world.same_experts.rank, True)

    def refuse_part(self, what: str) -> None:
        """Raise a `UsageError` if a rank has a part only of what is to be differentiated."""
        if self.is_part:
            raise UsageError(
                f"{what}: each rank computes with the weights of some experts only (ep_size), inside the experts' own forward; "
                "leave experts out there, or leave ep_size out"
            )


@dataclass(frozen=True)
class Routes:
    """Which rank of a group computes which expert, and where it has it: see [Note: experts].

    Attributes:
        num_experts: all of a module.
        num_ranks: of the group.
        num_chunks: ranks that parameters are cut over.
    """

    num_experts: int
    num_ranks: int
    num_chunks: int

    @property
    def num_local(self) -> int:
        """Experts that one rank computes."""
        return self.num_experts // self.num_ranks

    def places(self, expert_ids: Tensor) -> Tensor:
        """The experts' places in the order of the ranks that compute them: rank x `num_local` + place on that rank.

        `num_experts` for what is no expert.
        """
        size = self.num_experts // self.num_chunks
        chunk = expert_ids // size
        places = chunk % self.num_ranks * self.num_local + chunk // self.num_ranks * size + expert_ids % size
        return places.where((expert_ids >= 0) & (expert_ids < self.num_experts), self.num_experts)
