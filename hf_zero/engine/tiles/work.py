"""A function of tokens that is computed for some of them at a time, forward and backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import get_device_states, set_device_states

_HALF = (torch.float16, torch.bfloat16)

Compute = Callable[..., tuple[Tensor, ...]]


class Work:
    """A function that reads the parameters of a module, and acts on each token alone; for one call.

    Its backward computes each slice again. Gradients of parameters are added up slice by slice, those in half precision in
    float32: one product over all tokens would round them once, too.

    Args:
        module: whose parameters `compute` reads.
        size: tokens at a time.
        compute: of tokens [n, width], and of what goes with them [n, ...]; gives tensors [n, ...]. It may refer to `module`
            weakly only: a graph that refers to modules may hold itself.
    """

    def __init__(self, module: nn.Module, size: int, compute: Compute) -> None:
        self._module = weakref.ref(module)
        self._size = size
        self._compute = compute
        self._draws = any(isinstance(each, _DropoutNd) and each.p and each.training for each in module.modules())
        self._then: _Surroundings | None = None

    def __call__(self, tokens: Tensor, beside: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """The results for all tokens.

        Args:
            tokens: [num_tokens, width].
            beside: what goes with them, each [num_tokens, ...], without gradients.
        """
        self._then = _Surroundings(tokens, self._draws)
        weights = trained(self._reached()) if torch.is_grad_enabled() else []
        return _Tiles.apply(self, tuple(beside), tokens, *weights)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def _reached(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a graph has outlived its module"
        return module

    def _slices(self, num_tokens: int) -> Iterator[slice]:
        """Slices of at most `size` tokens; one of none, where there are none."""
        return (slice(start, start + self._size) for start in range(0, max(num_tokens, 1), self._size))

    def forward(self, tokens: Tensor, beside: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, without a graph."""
        assert self._then is not None
        with self._then.autocast():
            found = [self._compute(tokens[part], *(b[part] for b in beside)) for part in self._slices(len(tokens))]
        return tuple(each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True))

    def backward(
        self, tokens: Tensor, beside: Sequence[Tensor], gradients: Sequence[Tensor | None], wants_tokens: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the tokens, and of the module's trained parameters."""
        assert self._then is not None
        of_tokens = torch.zeros_like(tokens) if wants_tokens else None
        with self._then.again():
            weights = trained(self._reached())  # in a graph: some may be gathered for this
            sums = [_Sum(weight, len(tokens) > self._size) for weight in weights]
            for part in self._slices(len(tokens)):
                x = tokens[part].detach().requires_grad_(wants_tokens)
                results = self._compute(x, *(b[part] for b in beside))
                pairs = [(r, g[part]) for r, g in zip(results, gradients, strict=True) if g is not None]
                pairs = [(r, g) for r, g in pairs if r.requires_grad]
                del results
                if not pairs:
                    continue
                inputs = [x, *weights] if wants_tokens else weights
                found = torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
                del pairs, x
                if of_tokens is not None and found[0] is not None:
                    of_tokens[part] = found[0]
                for total, gradient in zip(sums, found[wants_tokens:], strict=True):
                    total.add(gradient)
                del found
        return of_tokens, [total.value() for total in sums]


class _Tiles(torch.autograd.Function):
    """A `Work` in the graph."""

    @staticmethod
    def forward(
        ctx: Any, work: Work, beside: tuple[Tensor, ...], tokens: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.work = work
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens, *beside)
        results = work.forward(tokens, beside)
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, *beside = ctx.saved_tensors
        of_tokens, of_weights = ctx.work.backward(tokens, beside, gradients, ctx.needs_input_grad[2])
        return (None, None, of_tokens, *of_weights)


class _Sum:
    """The gradient of one parameter, of all slices."""

    def __init__(self, weight: Tensor, has_several: bool) -> None:
        self._dtype = weight.dtype
        self._total: Tensor | None = None
        self._is_widened = has_several and weight.dtype in _HALF

    def add(self, gradient: Tensor | None) -> None:
        """Add that of one slice."""
        if gradient is None:
            return
        if self._total is None:
            self._total = gradient.float() if self._is_widened else gradient.contiguous()
        else:
            self._total += gradient

    def value(self) -> Tensor | None:
        """The sum, in the parameter's dtype; None if no slice had one."""
        return None if self._total is None else self._total.to(self._dtype)


class _Surroundings:
    """Autocast and the state of random numbers, as they were in a forward.

    Weights that autocast has cast are not cached: a cast that was made without a graph would be found where one is needed.
    """

    def __init__(self, tokens: Tensor, draws: bool) -> None:
        self._kind = kind = tokens.device.type
        self._is_on, self._dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._devices = [tokens.get_device()] if draws and kind != "cpu" else []
        self._cpu_state = torch.get_rng_state() if draws else None
        self._device_states = get_device_states(tokens)[1] if self._devices else []

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast as it was."""
        return torch.autocast(self._kind, dtype=self._dtype, enabled=self._is_on, cache_enabled=False)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within: what was then, in a graph."""
        with contextlib.ExitStack() as stack:
            if self._cpu_state is not None:
                stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._kind))
                torch.set_rng_state(self._cpu_state)
                if self._devices:
                    set_device_states(self._devices, self._device_states, device_type=self._kind)
            stack.enter_context(self.autocast())
            stack.enter_context(torch.enable_grad())
            yield


def trained(module: nn.Module) -> list[Tensor]:
    """The trained parameters of a module and its parts, as they compute with them now; each once."""
    found = {}
    for each in module.modules():
        for name in each._parameters:
            tensor = each._parameters[name]
            if tensor is not None and tensor.requires_grad:
                found[id(tensor)] = tensor
    return list(found.values())
