"""One rank of a part of the first run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from hf_zero.bench import devices
from hf_zero.bench.gpu.correctness import killed, parity, resume
from hf_zero.bench.gpu.memory import communicators, offload, peak
from hf_zero.bench.gpu.overlap import overlap
from hf_zero.bench.gpu.page import Section
from hf_zero.bench.processes import options, report

_PARTS: dict[str, Callable[[torch.device, dict[str, Any]], Section]] = {
    each.__name__: each for each in (parity, communicators, overlap, peak, offload, resume, killed)
}


def main() -> None:
    """Run the part that the options name."""
    given = options()
    device = devices.join()
    report(asdict(_PARTS[given["part"]](device, given)))
    sys.stdout.flush()
    os._exit(0)  # a peer may be gone, and groups wait for each other when they are taken down


if __name__ == "__main__":
    main()
