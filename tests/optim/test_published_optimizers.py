"""Optimizers that others published beside one process, as many as are installed. Slow; the packages are not among ours:

pip install lion-pytorch schedulefree pytorch_optimizer prodigyopt dadaptation galore-torch apollo-torch adam-mini \
    bitsandbytes torch-optimi came-pytorch muon-optimizer
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.test_stepping import Make, furthest, make, matrices, train
from tests.ranks import run_alone, run_ranks

pytestmark = pytest.mark.slow

_REFUSED = {
    *("Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan"),
    *("dadaptlion", "dadaptsgd", "adagc", "adai", "adams", "asgd", "avagrad", "lbfgs"),
    *("demo", "sara", "spam"),  # cannot be tried
}
_RANDOM = {"gravity", "kron", "magma"}  # they draw random numbers, so that the order of parameters counts
_BATCHED = {"dash"}  # multiplies matrices of several parameters in one call, which rounds differently with their number
_AVERAGED = {
    "schedulefreeadamw",
    "schedulefreeradam",
    "schedulefreesgd",
    "splus",
}  # their `eval()` mixes owners' states with rows, which is an error


def _rest(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim != 2]


def _low_rank(cls: Any, options: dict[str, Any], **arguments: Any) -> Make:
    projected = {"rank": 4, "update_proj_gap": 2, "scale": 0.5, "proj_type": "std", **options}
    return lambda model: cls([{"params": _rest(model)}, {"params": matrices(model), **projected}], lr=1e-2, **arguments)


def _simple(cls: Any, **options: Any) -> Make:
    return lambda model: cls(model.parameters(), **options)


def _factories(package: str) -> Iterator[tuple[str, Make]]:
    module: Any = importlib.import_module(package)
    if package == "lion_pytorch":
        yield "Lion", _simple(module.Lion, lr=1e-3)
    elif package == "schedulefree":
        for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeClosure"):
            yield name, _simple(getattr(module, name), lr=1e-2)
    elif package in ("prodigyopt", "dadaptation"):
        for name in ("Prodigy",) if package == "prodigyopt" else ("DAdaptAdam", "DAdaptSGD", "DAdaptLion"):
            yield name, _simple(getattr(module, name))
    elif package == "galore_torch":
        yield "GaLoreAdamW", _low_rank(module.GaLoreAdamW, {})
        yield "GaLoreAdafactor", _low_rank(module.GaLoreAdafactor, {}, relative_step=False, scale_parameter=False)
    elif package == "apollo_torch":
        yield "APOLLOAdamW", _low_rank(module.APOLLOAdamW, {"proj": "random", "scale_type": "channel"})
    elif package == "adam_mini":
        yield "Adam_mini", lambda m: module.Adam_mini(named_parameters=m.named_parameters(), lr=1e-3, dim=24, n_heads=2)
    elif package == "came_pytorch":
        yield "CAME", _simple(module.CAME, lr=1e-3)
    elif package == "muon":
        aux = {"use_muon": False, "lr": 1e-3}
        groups = lambda m: [{"params": matrices(m), "use_muon": True, "lr": 0.02}, {"params": _rest(m), **aux}]  # noqa: E731
        yield "SingleDeviceMuonWithAuxAdam", lambda m: module.SingleDeviceMuonWithAuxAdam(groups(m))
    elif package == "optimi":
        for name in ("StableAdamW", "AdamW", "Adan", "Lion", "RAdam", "Ranger"):
            yield name, _simple(getattr(module, name), lr=1e-3)
    elif package == "bitsandbytes":
        for name in ("AdamW", "Adam", "Lion", "RMSprop", "LAMB", "AdEMAMix", "Adagrad", "SGD", "LARS"):
            momentum = {"momentum": 0.9} if name in ("SGD", "LARS") else {}
            yield name, _simple(getattr(module.optim, name), lr=1e-3, **momentum)
        for name in ("AdamW8bit", "Lion8bit", "PagedAdamW8bit"):
            yield name, _simple(getattr(module.optim, name), lr=1e-3, min_8bit_size=64)
    else:
        for name in sorted(module.get_supported_optimizers()):
            yield name, _simple(module.load_optimizer(name))


def outcomes(package: str, stage: int, where: str) -> dict[str, str]:
    """What became of each of a package's optimizers; those that fail in one process are left out."""
    found = {}
    for name, factory in _factories(package):
        oracle = make()
        try:
            theirs = factory(oracle)
            _train(oracle, theirs)
        except Exception:  # needs more than parameters and gradients
            continue
        try:
            model = make(stage, optimizer_on=where)
            ours = factory(model)
            _train(model, ours)
            found[name] = (
                "equal" if furthest(model, oracle) <= _tolerance(ours) else f"off by {furthest(model, oracle):.2g}"
            )
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _tolerance(optimizer: torch.optim.Optimizer) -> float:
    """Fused kernels round differently with the length of what they are given, so rows differ in the last bit."""
    if type(optimizer).__name__.lower() in _BATCHED:
        return 1e-4
    return 1e-6 if any(group.get("fused") for group in optimizer.param_groups) else 0.0


def _train(model: nn.Module, optimizer: Any) -> None:
    for number in range(4):
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        torch.manual_seed(number)
        train(model, optimizer, [number])
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()


_PACKAGES = (
    *("lion_pytorch", "schedulefree", "prodigyopt", "dadaptation", "galore_torch", "apollo_torch", "adam_mini"),
    *("bitsandbytes", "optimi", "came_pytorch", "muon", "pytorch_optimizer"),
)


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("package", _PACKAGES)
def test_published_optimizers_equal_one_process(package: str, num_ranks: int) -> None:
    if not run_alone(_is_installed, package):  # not asked here, where tests of recipes have put those on the path
        pytest.skip(f"{package} is not installed")
    first, *_ = everywhere = run_ranks(outcomes, num_ranks, package, 3, "auto", timeout_s=300)
    for name, said in first.items():
        if name in _REFUSED:
            assert all("UsageError" in found[name] for found in everywhere), (name, said)
        elif name not in _RANDOM | _AVERAGED:
            assert all(found[name] == "equal" for found in everywhere), (name, said)
    print(f"{package}: {sum(said == 'equal' for said in first.values())} of {len(first)} equal one process")
    first, *_ = everywhere = run_ranks(outcomes, num_ranks, package, 3, "every_rank", timeout_s=300)
    print(f"{package}, every_rank: { {name: said for name, said in first.items() if said != 'equal'} } of {len(first)}")
    assert all(said == "equal" for found in everywhere for said in found.values())
