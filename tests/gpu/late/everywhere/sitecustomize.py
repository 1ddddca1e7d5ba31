"""With this folder in PYTHONPATH, and LATE_ORDER set, every process of Python has the late device, as it would have a GPU."""

import atexit
import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

if "LATE_ORDER" in os.environ:
    import torch

    from tests.gpu.late.device import register
    from tests.gpu.late.run import make_up_for_torch, tell_accelerate

    _built = register()
    _built.run_early(os.environ["LATE_ORDER"] == "early")
    make_up_for_torch()
    tell_accelerate(torch.device("sim", int(os.environ.get("LOCAL_RANK", "0"))))

    _export = torch.profiler.profile.export_chrome_trace

    def _export_with_kernels(profile: Any, path: str) -> None:
        """With kernels as CUDA's, of which the profiler sees none here: gathers, half of them beside a product of matrices."""
        _export(profile, path)
        trace = json.loads(Path(path).read_text())
        for number, name in itertools.product(range(4), ("ncclDevKernel_AllGather_RING_LL(...)", "gemm")):
            length = 50 if name == "gemm" and number % 2 else 100
            trace["traceEvents"].append({"cat": "kernel", "name": name, "ts": 200 * number, "dur": length, "ph": "X"})
        Path(path).write_text(json.dumps(trace))

    torch.profiler.profile.export_chrome_trace = _export_with_kernels  # type: ignore[method-assign]

    def _tell_and_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)  # torch catches what goes to the other
        sys.__stderr__.flush()
        os._exit(1)

    def _end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    sys.excepthook = _tell_and_end
    if "WORLD_SIZE" in os.environ:  # of ranks: torch does not take such a device down in order
        atexit.register(_end)
