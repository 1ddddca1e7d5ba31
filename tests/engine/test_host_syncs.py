"""A step never asks a tensor for its value: on a GPU, this process would wait for all that it has launched."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero as zero
from tests.engine.twins import STAGES
from tests.models import CASES, make_model
from tests.ranks import on_ranks

_ASKS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item", "masked_select", "unique_dim"}


class _Watch(TorchDispatchMode):
    """Collects operations that need the value of a floating tensor on the host. Votes are integers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name in _ASKS and any(each.is_floating_point() or each.dtype == torch.bool for each in tensors):
            lines = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            if "/transformers/" not in lines[-1].filename:  # its masks are its own
                self.asked.append(f"{name} at {lines[-1].filename}:{lines[-1].lineno}")
        return func(*args, **(kwargs or {}))


@on_ranks(2, stage=STAGES, case=[("float32", True), ("bfloat16", False)])
def test_steps_ask_no_tensor_for_its_value(stage: int, case: tuple[str, bool]) -> None:
    compute, clips = case
    model = make_model(CASES["llama"])
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise", "compute_dtype": compute})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch = _Watch()
    for step in range(2):
        watch.asked.clear()
        with watch:
            for micro in range(2):
                with model.no_sync() if micro == 0 else torch.enable_grad():  # type: ignore[operator]
                    loss = model(**CASES["llama"].batch(step, dist.get_rank())).loss
                    loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert watch.asked == []
    with watch:
        bool(loss.detach() > 0)
    assert watch.asked  # a question would have been seen
