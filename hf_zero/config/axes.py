"""Sizes of axes: by the names of the papers (`dp_degree`, `mp_degree`, `pp_degree`), and what each of them goes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_zero.config import values
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from hf_zero.config.zero_config import ZeroConfig

DEGREES = ("dp_degree", "mp_degree", "pp_degree")


def take_degrees(mapping: Mapping[Any, Any], source: str) -> Mapping[Any, Any]:
    """A configuration in our own names: `mp_degree` is `tp_size`, and the product of all is `expected_world_size`.

    Args:
        mapping: as it was written.
        source: where it comes from; the errors name it.

    Raises:
        ConfigError: a degree is no number, contradicts another key, or is one of pipeline stages.
    """
    given = {key: mapping[key] for key in DEGREES if mapping.get(key) is not None}
    rest = {key: value for key, value in mapping.items() if key not in DEGREES}
    if not given:
        return rest
    try:
        sizes = {key: values.count(key, value, minimum=1, unit="ranks") for key, value in given.items()}
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if sizes.get("pp_degree", 1) > 1:
        raise ConfigError(
            f"{source}: key 'pp_degree': {sizes['pp_degree']} stages of a pipeline need a training loop of their own, which "
            "recipes/pipeline.py has; leave pp_degree out, or use that recipe"
        )
    meant = {"tp_size": sizes.get("mp_degree")}
    if "dp_degree" in sizes:
        others = [] if "mp_degree" in sizes else [rest.get("tp_size", 1)]
        meant["expected_world_size"] = math.prod(
            [*sizes.values(), *others, rest.get("sp_size", 1), rest.get("cp_size", 1)]
        )
    for key, value in meant.items():
        if value is not None and rest.get(key, value) != value:
            raise ConfigError(
                f"{source}: key '{key}': {values.shown(rest[key])}, but {given} mean {value}; leave one of them out"
            )
    return {**rest, **{key: value for key, value in meant.items() if value is not None}}


def sharing_sequences(sp_size: int, cp_size: int) -> str:
    """The keys by which ranks share sequences, as errors name them."""
    sizes = {"sp_size": sp_size, "cp_size": cp_size}
    return " x ".join(key for key, size in sizes.items() if size > 1) or "sp_size"


def check_experts_on_tensor_axis(ep_size: int, tp_size: int) -> None:
    """Raise a `ConfigError` unless all ranks that share layers divide the experts between them, with as many others each."""
    if ep_size > 1 and ep_size % tp_size:
        values.fail(
            "ep_size",
            ep_size,
            f"cannot be had together with tp_size: {tp_size}: ranks that share every layer have its experts together, so use "
            f"ep_size: {tp_size} or a multiple; or remove one of them",
        )


def check_sizes(config: ZeroConfig) -> None:
    """Raise a `ConfigError` for sizes of axes that do not go with the rest of a configuration."""
    cuts, stage = config.policy.shards_optimizer, config.stage
    if config.replicate > 1 and not cuts:
        values.fail(
            "replicate",
            config.replicate,
            f"has no effect in stage {stage}, where every rank is a replica; remove it, or use stage 1, 2 or 3",
        )
    for key in ("tp_size", "ep_size"):
        if getattr(config, key) > 1 and not cuts:
            advice = f"cannot be had in stage {stage}, which partitions nothing; use stage 1, 2 or 3"
            values.fail(key, getattr(config, key), advice)
    check_experts_on_tensor_axis(config.ep_size, config.tp_size)
    others = {
        "cp_size": config.cp_size > 1,
        "offload": config.offload.is_anything,
        "wire": not config.wire.is_default,
        "tile_mlp": config.tile_mlp > 0,
        "keep_whole_numel": config.keep_whole_numel > 0,
        "units.whole": bool(config.units.whole),
    }
    found = [key for key, is_asked_for in others.items() if is_asked_for]
    if config.ep_size > config.tp_size and found:  # else experts are shared as layers are, with all that goes with that
        values.fail("ep_size", config.ep_size, f"cannot be had together with {' and '.join(found)}; remove one of them")
