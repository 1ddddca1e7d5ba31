"""ZeroConfig: what a user asks for, written in a call, a YAML or JSON file, or a DeepSpeed JSON file.

It imports neither torch nor yaml at the top, so that `--help` stays quick: dtypes are words here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hf_zero.config import files, keys, values
from hf_zero.config.activations import Activations
from hf_zero.config.axes import DEGREES, check_sizes, take_degrees
from hf_zero.config.deepspeed import rules as deepspeed_rules
from hf_zero.config.deepspeed import translate as deepspeed
from hf_zero.config.deepspeed.reader import ImportRow
from hf_zero.config.loss_scale import LossScale
from hf_zero.config.offload import Offload
from hf_zero.config.stages import POLICIES, StagePolicy
from hf_zero.config.units import UnitGrouping
from hf_zero.config.wire import Wire
from hf_zero.errors import ConfigError

__all__ = [
    "COLLECTIVES_VARIABLE",
    "DeepSpeedImport",
    "ImportRow",
    "LossScale",
    "StagePolicy",
    "UnitGrouping",
    "ZeroConfig",
    "load_with_import",
    "read_deepspeed",
]

COLLECTIVES_VARIABLE = "HF_ZERO_COLLECTIVES"
"""Environment variable: what `collectives: auto` stands for, instead of its rule."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How a model is partitioned over the ranks; validated on creation.

    Byte fields also accept strings ("64MiB", "1GiB", "500MB", "5e7") and hold bytes afterwards. Dtype fields also accept
    "bf16", "fp16", "fp32" and torch dtypes. `units` also accepts its YAML forms.

    Attributes:
        stage: what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        units: the sets of parameters that are gathered together.
        keep_whole_numel: a parameter of at most this many elements stays whole on every rank, in stage 3 and in the
            optimizer shard. 0: none does.
        prefetch_bytes: bytes of parameters gathered ahead of their use; one unit at least, whatever its size. What a forward
            ends with is ahead of the backward's use already, and stays. 0: none.
        bucket_bytes: bytes of whole gradients being reduced at once; `pairwise` receives the rows of larger ones in
            rounds of at most this size.
        compute_dtype: dtype that modules compute in; "auto": the parameter's own, or that of the Trainer's bf16 or fp16 flag
            (in stage 0 these mean autocast, as under DDP).
        cast_forward_inputs: whether floating inputs of the model, and of modules that are units, are cast to `compute_dtype`,
            where one is set and no autocast is on; as in FSDP2.
        keep_fp32: classes of modules ("LlamaRMSNorm"), or their names with wildcards ("*.router"), that compute in float32
            all the same, with all that is in them; see `hf_zero.engine.modules.float32`.
        loss_scale: how the loss is scaled where the compute dtype is float16; also accepts its YAML forms.
        master_dtype: dtype of the rows that the optimizer updates; "auto": the parameter's own.
        reduce_dtype: dtype in which gradients are added up across ranks; "auto": the compute dtype.
        gradient_reduction: whether gradients are averaged or summed over the ranks.
        broadcast_buffers: whether buffers become rank 0's at the forward after each backward that exchanges; as under DDP.
        collectives: how bytes move between ranks: "native" (torch.distributed's collectives), "pairwise" (each pair of
            ranks swaps what the other needs), "host" (ranks of one host share memory; CPU only). "auto" takes "host" where
            all ranks can share memory, else "pairwise" on gloo, and "native" on a device.
        timeout_s: seconds after which one exchange counts as failed; "auto": 120, or as long as the program lets its own take
            (`init_process_group(timeout=...)`, the Trainer's `ddp_timeout`), if that is longer.
        reduce_scatter: how each rank gets the sum of its own rows of a gradient. True reduce-scatters, False all-reduces
            whole gradients and keeps the rank's rows, "to_owner" reduces each rank's rows to it, with one reduce per rank.
        reshard_after_forward: whether a unit's whole parameters are released when its forward ends, and gathered again for its
            backward (stage 3 only). True does so. False keeps them in between, which saves one gather of three exchanges, and
            takes the memory of all parameters. A number of bytes keeps so many of them, from the model's end backwards. "auto"
            keeps as many as half of the memory that is free at the peak holds, on the rank that has least, once a whole step
            has run. They stay for all micro-batches of a step, and for the next step if most of a unit is frozen; see
            `hf_zero.engine.units.keeping`.
        gather_for_generation: whether `generate` gathers parameters once for the whole call, not for every token (stage 3
            only): True, False, the bytes that they may take, or "auto", half of what is free on the rank that has least.
        replicate: replicas of the model ("hybrid"): parameters are cut over the ranks of one replica only, so that rows never
            leave it; only sums of gradients travel between replicas. Ranks next to each other form a replica.
        tp_size: ranks next to each other that share every layer (tensor parallelism of transformers) and see the same batch;
            what each of them holds is cut over the others. The model must have a plan for it.
        sp_size: ranks next to each other that see the same batch, and compute a slice of its sequences each (causal models).
        ep_size: ranks next to each other that compute some experts each of every layer, and send each other the tokens of their
            own batches (mixture-of-experts models of transformers). With `tp_size`, it is equal, or a multiple: ranks that
            share every layer divide the experts first, and send each other no tokens.
        cp_size: likewise, where attention is not divided by heads: each rank's queries attend to the keys of all slices. With
            `sp_size` beside it, so many groups of `sp_size` ranks share each sequence.
        cp_comm_strategy: how these keys come from the other ranks: "allgather" gathers them all; "alltoall" passes slices
            around, so that a rank has two of them at a time (a ring).
        optimizer_on: what optimizers step on: "rows", which is right for elementwise ones alone; "whole" parameters, each on
            one rank; "every_rank": all of them, whole, on every rank, as under DDP; "auto": rows for those known (or marked by
            `mark_elementwise`) to be elementwise, else whole ones.
        expected_world_size: ranks that the run must have; None: any number.
        async_save: the Trainer's checkpoints are written while training continues, from copies of the rows.
        checkpoint_files: "shared" files of checkpoints are written by several ranks, each its bytes; "per_writer": no file is
            written by two ranks, and large ones become several (`NAME.00001-of-00012`), which `hf-zero export` joins.
        offload: what lives in host memory or on a disk between its uses; also accepts its YAML form.
        wire: formats in which parameters and gradients travel, if not as they are; also accepts its YAML form.
        activations: what is kept of the inputs of checkpointed layers; also accepts its YAML form.
        tile_tokens: tokens whose logits are computed at a time, in the loss and in its backward, so that the logits of a batch
            are never all there. 0: all of them.
        tile_mlp: tokens that a block's MLP computes at a time, forward and backward. 0: all of them.
        trace: a file of what all ranks did in steps 3 to 5, and when; see `hf-zero trace`.

    Raises:
        ConfigError: a value is wrong, or two values contradict each other.
    """

    stage: int = 3
    units: UnitGrouping = UnitGrouping()
    keep_whole_numel: int = 0
    prefetch_bytes: int = 64 * 2**20
    bucket_bytes: int = 64 * 2**20
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cast_forward_inputs: bool = True
    keep_fp32: tuple[str, ...] = ()
    loss_scale: LossScale = LossScale()
    master_dtype: Literal["auto", "float32"] = "float32"
    reduce_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    gradient_reduction: Literal["mean", "sum"] = "mean"
    broadcast_buffers: bool = True
    collectives: Literal["auto", "native", "pairwise", "host"] = "auto"
    timeout_s: float | Literal["auto"] = "auto"
    reduce_scatter: bool | Literal["to_owner"] = True
    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    gather_for_generation: bool | int | Literal["auto"] = "auto"
    replicate: int = 1
    tp_size: int = 1
    sp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    cp_comm_strategy: Literal["allgather", "alltoall"] = "allgather"
    optimizer_on: Literal["auto", "rows", "whole", "every_rank"] = "auto"
    expected_world_size: int | None = None
    async_save: bool = False
    checkpoint_files: Literal["shared", "per_writer"] = "shared"
    offload: Offload = Offload()
    wire: Wire = Wire()
    activations: Activations = Activations()
    tile_tokens: int = 0
    tile_mlp: int = 0
    trace: str | None = None

    def __post_init__(self) -> None:
        for key, check in _CHECKS.items():
            object.__setattr__(self, key, check(key, getattr(self, key)))
        is_usual = self.reshard_after_forward is True or self.reshard_after_forward == "auto"
        if not is_usual and not self.policy.shards_parameters:
            values.fail(
                "reshard_after_forward",
                self.reshard_after_forward,
                f"has no effect in stage {self.stage}, where parameters are whole anyway; remove it, or use stage 3",
            )
        self.units.check(self.stage, self.policy.shards_parameters, self.offload.parameters != "none")
        check_sizes(self)
        if self.reduce_scatter is not True and not self.policy.shards_optimizer:
            values.fail(
                "reduce_scatter",
                self.reduce_scatter,
                f"has no effect in stage {self.stage}, where no rank owns rows; remove it, or use stage 1, 2 or 3",
            )

        self._check_offload()
        if not self.wire.is_default:
            self._check_wire()

    def _check_wire(self) -> None:
        given = self.wire.to_value()
        if not self.policy.shards_optimizer:
            values.fail("wire", given, "has no effect in stage 0, where no rows travel; use stage 1, 2 or 3")
        if self.collectives == "host":
            values.fail("wire", given, "has no effect with collectives: host, where ranks share memory; use pairwise")
        if self.wire.secondary > 1 and not self.policy.shards_parameters:
            values.fail(
                "wire.secondary", self.wire.secondary, "has no effect in stages 1 and 2, which gather once a step"
            )
        if self.wire.reduce != "float32" and self.reduce_scatter is not True:
            values.fail("reduce_scatter", self.reduce_scatter, "cannot be had with wire.reduce; use true")

    def _check_offload(self) -> None:
        offload = self.offload
        if offload.optimizer != "none" and not self.policy.shards_optimizer:
            values.fail("offload.optimizer", offload.optimizer, "has no effect in stage 0; use stage 1, 2 or 3")
        if offload.parameters != "none" and not self.policy.shards_parameters:
            values.fail(
                "offload.parameters",
                offload.parameters,
                f"has no effect in stage {self.stage}, where parameters are whole all the time; use stage 3",
            )
        if offload.parameters == "disk" and self.collectives == "host":
            values.fail(
                "collectives", "host", "keeps parameters in memory, but offload.parameters is disk; use pairwise"
            )
        if "disk" in (offload.optimizer, offload.parameters) and self.async_save:
            values.fail(
                "async_save", True, "copies what is saved into memory, but offload keeps it on a disk; use false"
            )

    @property
    def policy(self) -> StagePolicy:
        """What the stage means, for code that must not ask for its number."""
        return POLICIES[self.stage]

    @property
    def limit_s(self) -> float:
        """`timeout_s` as a number; of "auto", what counts where no program has asked for more."""
        return _TIMEOUT_S if self.timeout_s == "auto" else self.timeout_s

    @property
    def exchange(self) -> str:
        """`collectives`; "auto" is what HF_ZERO_COLLECTIVES says, if it is set. Raises ConfigError for an unknown word."""
        if self.collectives != "auto":
            return self.collectives
        return values.collectives(COLLECTIVES_VARIABLE, os.environ.get(COLLECTIVES_VARIABLE) or "auto")

    @classmethod
    def load(
        cls, source: ZeroConfig | Mapping[str, Any] | str | int | os.PathLike[str] | None = None, **overrides: Any
    ) -> ZeroConfig:
        """Load a config from wherever it is written.

        A DeepSpeed file is recognised. What it says about training (batch size, optimizer, clipping) is not part of a
        ZeroConfig; `load_with_import` returns that too.

        Args:
            source: a config, a stage (3), a mapping, a path (.yaml, .yml, .json), the name of a file that comes with the
                package ("zero3"), or JSON text that starts with "{". None: what the variable HF_ZERO_CONFIG says.
            **overrides: fields that replace those of the source.

        Raises:
            ConfigError: the source is missing, unreadable, or has a mistake.
        """
        return load_with_import(source, **overrides)[0]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ZeroConfig:
        """The config in a YAML (.yaml, .yml) or JSON (.json) file, in our format or DeepSpeed's."""
        return _from_mapping(files.read_file(os.fsdecode(path)), os.fsdecode(path))[0]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], source: str = "the given mapping") -> ZeroConfig:
        """The config that a mapping describes, in our format or DeepSpeed's.

        Args:
            mapping: keys and values as YAML or JSON gives them.
            source: where it comes from; the errors name it.
        """
        return _from_mapping(mapping, source)[0]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that YAML and JSON can hold; `from_dict` gives the same config back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        forms = {
            key: getattr(self, key).to_value() for key in ("units", "loss_scale", "offload", "wire", "activations")
        }
        return values | forms | {"keep_fp32": list(self.keep_fp32)}

    def replace(self, **changes: Any) -> ZeroConfig:
        """A copy with some fields changed, validated again."""
        for key in changes:
            if key not in _CHECKS:
                raise ConfigError(keys.unknown(key, _CHECKS))
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class DeepSpeedImport:
    """What a DeepSpeed file means here.

    Attributes:
        config: its ZeRO part.
        training: values of the Trainer's arguments that it implies, by argument name; "auto" ones are left out.
        rows: what became of every key, in words.
    """

    config: ZeroConfig
    training: Mapping[str, Any]
    rows: tuple[ImportRow, ...]

    def table(self) -> str:
        """The rows as a plain aligned text table."""
        return deepspeed.render_table(self.rows)


def load_with_import(
    source: ZeroConfig | Mapping[str, Any] | str | int | os.PathLike[str] | None = None, **overrides: Any
) -> tuple[ZeroConfig, DeepSpeedImport | None]:
    """Like `ZeroConfig.load`, and returns the import too if the source was a DeepSpeed file (with overrides applied).

    Raises:
        ConfigError: as `ZeroConfig.load`.
    """
    if isinstance(source, ZeroConfig):
        return source.replace(**overrides), None
    mapping, name = files.read(source)
    config, imported = _from_mapping(mapping, name)
    if overrides:
        try:
            config = config.replace(**overrides)
        except ConfigError as error:
            raise ConfigError(f"{name}, with the given overrides: {error}") from None
    if imported is None:
        return config, None
    files.show_once(f"hf_zero: {name} is a DeepSpeed file; what it means here:\n{imported.table()}\n")
    return config, dataclasses.replace(imported, config=config)


def read_deepspeed(source: Mapping[str, Any] | str | os.PathLike[str]) -> DeepSpeedImport:
    """What a DeepSpeed mapping, file or JSON text means here.

    Raises:
        ConfigError: it is not a DeepSpeed config, or asks for something that would train differently here.
    """
    mapping, name = files.read(source)
    imported = _from_mapping(mapping, name)[1]
    if imported is None:
        raise ConfigError(f"{name}: is not a DeepSpeed config: it has none of its keys, such as 'zero_optimization'")
    return imported


# ---- keys ------------------------------------------------------------------------------------------------------------

_CHECKS: dict[str, Callable[[str, object], object]] = {
    "stage": partial(values.integer, minimum=0, maximum=len(POLICIES) - 1, advice="is not a stage; use 0, 1, 2 or 3"),
    "units": lambda key, value: UnitGrouping.from_value(value),
    "keep_whole_numel": partial(values.count, minimum=0),
    "prefetch_bytes": partial(values.num_bytes, minimum=0),
    "bucket_bytes": partial(values.num_bytes, minimum=1),
    "compute_dtype": partial(values.dtype, words=("auto", "float32", "bfloat16", "float16")),
    "cast_forward_inputs": values.boolean,
    "keep_fp32": values.names,
    "loss_scale": lambda key, value: LossScale.from_value(value),
    "master_dtype": partial(values.dtype, words=("auto", "float32")),
    "reduce_dtype": partial(values.dtype, words=("auto", "float32", "bfloat16", "float16")),
    "gradient_reduction": partial(values.word, words=("mean", "sum")),
    "broadcast_buffers": values.boolean,
    "collectives": values.collectives,
    "timeout_s": values.seconds_or_auto,
    "reduce_scatter": values.reduce_scatter,
    "reshard_after_forward": values.boolean_or_bytes,
    "gather_for_generation": values.boolean_or_bytes,
    "replicate": partial(values.count, minimum=1),
    "tp_size": partial(values.count, minimum=1),
    "sp_size": partial(values.count, minimum=1),
    "ep_size": partial(values.count, minimum=1),
    "cp_size": partial(values.count, minimum=1),
    "cp_comm_strategy": partial(values.word, words=("allgather", "alltoall")),
    "optimizer_on": partial(values.word, words=("auto", "rows", "whole", "every_rank")),
    "expected_world_size": values.world_size,
    "async_save": values.boolean,
    "checkpoint_files": partial(values.word, words=("shared", "per_writer")),
    "offload": lambda key, value: Offload.from_value(value),
    "wire": lambda key, value: Wire.from_value(value),
    "activations": lambda key, value: Activations.from_value(value),
    "tile_tokens": partial(values.count, minimum=0, unit="tokens"),
    "tile_mlp": partial(values.count, minimum=0, unit="tokens"),
    "trace": values.file,
}


# ---- sources ---------------------------------------------------------------------------------------------------------


def _from_mapping(mapping: object, source: str) -> tuple[ZeroConfig, DeepSpeedImport | None]:
    if mapping is None:
        raise ConfigError(f"{source}: is empty; write for example 'stage: 3'")
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"{source}: holds a {type(mapping).__name__}, not keys with values; write for example 'stage: 3'"
        )
    if not any(key in mapping for key in (*_CHECKS, *DEGREES)) and any(
        key in mapping for key in deepspeed_rules.TOP_KEYS
    ):
        translation = deepspeed.translate(mapping, source)
        config = _make(translation.zero, source)
        return config, DeepSpeedImport(config, dict(translation.training), translation.rows)
    return _make(mapping, source), None


def _make(mapping: Mapping[Any, Any], source: str) -> ZeroConfig:
    mapping = take_degrees(mapping, source)
    for key in mapping:
        if not isinstance(key, str) or key not in _CHECKS:
            raise ConfigError(f"{source}: {keys.unknown(key, _CHECKS)}")
    try:
        return ZeroConfig(**mapping)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
