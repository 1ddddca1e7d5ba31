"""The shapes of a model's parameters, by the units that they are gathered in."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero import torch_compat
from hf_zero.config.units import UnitGrouping
from hf_zero.engine.parameters.experts import is_of_experts
from hf_zero.engine.units.grouping import FoundParameter, group
from hf_zero.errors import UsageError
from hf_zero.plan.models import SIZES, config_of
from hf_zero.plan.states import Uses

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZE = re.compile(r"^(num|n|max|d)_|_(size|dim|layers?|heads|width|positions)$")  # of keys that count or measure


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: its first name in the model.
        shape: of the whole.
        dtype: that it was made in.
        trains: whether it gets gradients.
        of_experts: it has a row for each expert, which ranks may divide (`ep_size`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    of_experts: bool = False

    @property
    def numel(self) -> int:
        """Its elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class UnitShape:
    """Parameters that are gathered together.

    Attributes:
        name: of the modules whose calls need them.
        parameters: in order.
        uses: in a step.
    """

    name: str
    parameters: tuple[ParameterShape, ...]
    uses: Uses


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as memory and traffic go.

    Attributes:
        name: of its class.
        units: in the order of the model.
        buffer_bytes: of its buffers, whole on every rank.
    """

    name: str
    units: tuple[UnitShape, ...]
    buffer_bytes: int

    @property
    def parameters(self) -> list[ParameterShape]:
        """All parameters, each once."""
        return [param for unit in self.units for param in unit.parameters]

    def one_by_one(self) -> ModelShape:
        """The same model with a unit for each parameter, which no grouping goes below."""
        units = [UnitShape(p.name, (p,), unit.uses) for unit in self.units for p in unit.parameters]
        return ModelShape(self.name, tuple(units), self.buffer_bytes)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel for param in self.parameters)


def shapes_of(model: nn.Module, grouping: UnitGrouping | None = None, in_4bit: bool = False) -> ModelShape:
    """The shapes of a model, which may be on the meta device.

    Of experts, those that have been marked (`mark_experts`); of layers that ranks share, this rank's part.

    Args:
        model: any module.
        grouping: its units.
        in_4bit: frozen weights of linear layers, but for the head, as bitsandbytes packs them with double quantisation.

    Raises:
        ConfigError: `grouping` names classes that the model does not have.
    """
    packed = _linear_weights(model) if in_4bit else {}
    units = tuple(
        UnitShape(
            each.name,
            tuple(_shape_of(f, id(f.param) in packed) for f in each.params),
            Uses.of(each.name, each.entries),
        )
        for each in group(model, grouping or UnitGrouping())
    )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    buffer_bytes += sum(map(_state_bytes, packed.values()))
    return ModelShape(type(model).__name__, units, buffer_bytes)


def _shape_of(found: FoundParameter, is_packed: bool) -> ParameterShape:
    name, param = found.names[0], found.param
    if is_packed:
        return ParameterShape(name, (-(-param.numel() // 2), 1), torch.uint8, False)
    of_experts = is_of_experts(found.locations)
    return ParameterShape(name, tuple(torch_compat.local_of(param).shape), param.dtype, param.requires_grad, of_experts)


def _linear_weights(model: nn.Module) -> dict[int, nn.Parameter]:
    """Frozen weights that are quantised when a model is loaded in 4 bits, by id: those of all linear layers but the head."""
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    weights: list[nn.Parameter] = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]  # type: ignore[misc]
    return {id(weight): weight for weight in weights if not weight.requires_grad}


def _state_bytes(weight: nn.Parameter) -> int:
    """What bitsandbytes 0.50 keeps beside a weight in 4 bits: scales of blocks of 64, scales of 256 of those, two tables."""
    blocks = -(-weight.numel() // 64)
    return blocks + -(-blocks // 256) * 4 + (16 + 256 + 1) * 4


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model with LoRA adapters on all its linear layers, and all else frozen.

    Args:
        model: on the meta device.
        rank: of the adapters.

    Raises:
        UsageError: PEFT is missing, or cannot adapt the model.
    """
    try:
        import peft
    except ImportError as error:
        raise UsageError("--lora needs PEFT: pip install peft") from error
    try:
        with torch.device("meta"):
            adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    except (ValueError, KeyError) as error:
        raise UsageError(f"PEFT cannot adapt {type(model).__name__}: {_shortly(error)}") from error
    return adapted.train()


def meta_model(name_or_folder: str) -> nn.Module:
    """A model of transformers on the meta device, of the class that its configuration names; made in float32.

    Args:
        name_or_folder: a benchmark's name (llama-125m), a folder with a config.json, or a name on the hub.

    Raises:
        UsageError: there is no such configuration, or transformers cannot make the model of it.
    """
    import transformers

    config = configuration(name_or_folder)
    names = [name for name in getattr(config, "architectures", None) or [] if hasattr(transformers, name)]
    try:
        made = getattr(transformers, names[0])._from_config if names else transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model: nn.Module = made(config, dtype=torch.float32)
    except Exception as error:  # as above
        raise UsageError(f"transformers cannot make {name_or_folder!r}: {_shortly(error)}") from error
    return model.train()


def configuration(name_or_folder: str) -> PretrainedConfig:
    """The configuration of a model, by a benchmark's name, a folder with a config.json, or a name on the hub.

    Raises:
        UsageError: there is none, or it has a mistake.
    """
    from transformers import AutoConfig

    try:
        if name_or_folder in SIZES or Path(name_or_folder, "config.json").is_file():
            config = config_of(name_or_folder)
        else:
            config = AutoConfig.from_pretrained(name_or_folder)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no configuration of {name_or_folder!r}: give a folder with a config.json, a name on the hub that this machine "
            f"can reach (`hf auth login` for gated ones), or one of {', '.join(SIZES)} ({_shortly(error)})"
        ) from error
    except Exception as error:  # transformers raises all kinds of errors for values that it does not expect
        raise UsageError(f"the configuration of {name_or_folder!r} has a mistake: {_shortly(error)}") from error
    _check_sizes(config, name_or_folder)
    return config


def _check_sizes(config: PretrainedConfig, name_or_folder: str) -> None:
    """Raise for a size below 0, of which a model of no layers, or an error of torch's, would be made."""
    for key, value in vars(config).items():
        if isinstance(value, int) and value < 0 and _SIZE.search(key):
            raise UsageError(f"the configuration of {name_or_folder!r} has a mistake: {key} is {value}")


def _shortly(error: Exception) -> str:
    """An error of another library as part of a line."""
    return textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__
