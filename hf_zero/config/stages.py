"""What the stages mean. Beside `zero_config`, which checks them, no file knows their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePolicy:
    """What a stage shards over the ranks; what it does not shard stays whole on every rank.

    Attributes:
        shards_optimizer: each rank holds only its own rows of the optimizer states (and masters).
        shards_gradients: after every micro-batch, gradients are reduced to each rank's own rows, and stay so.
        shards_parameters: each rank keeps only its own rows of the parameters; they are gathered for each use.

    Source: ZeRO (arXiv:1910.02054), section 5.
    """

    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool


POLICIES = (
    StagePolicy(False, False, False),  # 0: data parallelism; the baseline that the others are checked against
    StagePolicy(True, False, False),  # 1: P_os; one reduce-scatter and one gather per step
    StagePolicy(True, True, False),  # 2: P_os+g; one reduce-scatter per micro-batch
    StagePolicy(True, True, True),  # 3: P_os+g+p; parameters are gathered for forward and for backward
)
