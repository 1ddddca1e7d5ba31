"""DeepSpeed's blocks that offload, in our terms.

Source: DeepSpeed 0.19, `runtime/zero/offload_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.deepspeed.reader import Reader
from hf_zero.config.deepspeed.rules import OFFLOAD_RULES, OFFLOAD_TRANSLATED, SHARDED_ONLY

_PLACES = {None: "none", "none": "none", "cpu": "host", "nvme": "disk"}
_BLOCKS = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
_OLD = {"cpu_offload": "optimizer", "cpu_offload_param": "parameters"}


def translate_offload(reader: Reader, zero: Mapping[Any, Any]) -> None:
    """What `offload_optimizer` and `offload_param` mean here; the stage is known already.

    Args:
        reader: written.
        zero: the block "zero_optimization".

    Raises:
        ConfigError: a key is unknown, or a value is wrong or would train differently here.
    """
    found: dict[str, Any] = {}
    for name, what in _BLOCKS.items():
        if zero.get(name) is not None:
            _translate_block(reader, f"zero_optimization.{name}", zero[name], what, found)
    for name, what in _OLD.items():
        if name in zero:
            key = f"zero_optimization.{name}"
            if reader.flag(key, zero[name]) and _is_used(reader, what):
                found.setdefault(what, "host")
            reader.row(key, zero[name], f"offload.{what}={found.get(what, 'none')}")
    if any(found.get(what, "none") != "none" for what in _BLOCKS.values()):
        reader.zero["offload"] = found


def _translate_block(reader: Reader, key: str, value: object, what: str, found: dict[str, Any]) -> None:
    block = reader.block(key, value)
    reader.refuse_unknown(f"{key}.", block, {*OFFLOAD_RULES, *OFFLOAD_TRANSLATED})
    device = block.get("device", "none")
    if not isinstance(device, str | None) or device not in _PLACES:
        raise reader.error(f"{key}.device", device, "is not a place; use none, cpu or nvme")
    place = _PLACES[device]
    if place != "none" and not _is_used(reader, what):
        reader.row(f"{key}.device", device, "only used in stage 3" if what == "parameters" else SHARDED_ONLY)
        place = "none"
    else:
        reader.row(f"{key}.device", device, f"offload.{what}={place}")
    if place == "none":
        return
    found[what] = place
    if place == "disk":
        path = block.get("nvme_path")
        if not isinstance(path, str) or found.get("path", path) != path:
            raise reader.error(
                f"{key}.nvme_path", path, "must be one folder on a fast disk, the same for all that is offloaded"
            )
        found["path"] = path
        reader.row(f"{key}.nvme_path", path, f"offload.path={path}")
    if block.get("ratio") is not None:
        ratio = float(reader.number(f"{key}.ratio", block["ratio"]))
        if what == "optimizer":
            found["ratio"] = ratio
        note = f"offload.ratio={ratio}" if what == "optimizer" else "all parameters are offloaded"
        reader.row(f"{key}.ratio", block["ratio"], note, "kept" if what == "optimizer" or ratio == 1 else "differs")
    if block.get("buffer_count") is not None:
        count = max(3, reader.count(f"{key}.buffer_count", block["buffer_count"]))
        if what == "optimizer":
            found["slots"] = count
        note = f"offload.slots={count}" if what == "optimizer" else "parameters need no buffers of their own"
        reader.row(f"{key}.buffer_count", block["buffer_count"], note)
    if block.get("pin_memory") is not None:
        is_pinned = reader.flag(f"{key}.pin_memory", block["pin_memory"])
        if place == "host":  # one key for both: what is pinned for one is for the other
            found["pin"] = is_pinned or found.get("pin", False)
        note = f"offload.pin={str(is_pinned).lower()}" if place == "host" else "files are read past the page cache"
        reader.row(f"{key}.pin_memory", block["pin_memory"], note)
    reader.judge(f"{key}.", block, OFFLOAD_RULES)


def _is_used(reader: Reader, what: str) -> bool:
    return bool(reader.zero["stage"] == 3 if what == "parameters" else reader.zero["stage"])
