"""What a trace says about exchanges beside the computation."""

import json
from pathlib import Path

from hf_zero.bench.gpu.overlap import Covered, Kernel, coverage, kernels_of, told

_GATHER, _REDUCTION = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "ncclDevKernel_ReduceScatter_Sum_f32(...)"


def test_exchanges_are_covered_by_what_is_computed_at_the_same_time() -> None:
    found = coverage(
        [
            Kernel(_GATHER, 0, 100),
            Kernel("gemm", 0, 60),
            Kernel("elementwise", 40, 80),  # on another stream: overlaps, and counts once
            Kernel(_GATHER, 100, 200),
            Kernel("gemm", 190, 300),
            Kernel(_REDUCTION, 250, 350),
            Kernel("ncclDevKernel_AllReduce_Sum_f32", 400, 410),
        ]
    )
    assert found == {
        "gather": Covered(2, 1, 200, 20 + 90),
        "other": Covered(1, 0, 10, 10),
        "reduction": Covered(1, 1, 100, 50),
    }


def test_kernels_are_read_from_what_the_profiler_exports(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2, "ph": "X"},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "ph": "X"},
        {"cat": "kernel", "name": "a mark", "ts": 1, "ph": "i"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert kernels_of(path) == [Kernel("gemm", 1.5, 3.5)]


def test_bare_gathers_say_what_to_do() -> None:
    section = told([Kernel(_GATHER, 0, 100), Kernel("gemm", 100, 200)])
    assert section.verdict == "look"
    assert section.said.startswith("0 of 1 gathers had compute beside them")
    assert "50% of the time" in section.said
    assert any("prefetch_bytes" in each for each in section.to_do)
    assert told([Kernel(_GATHER, 0, 100), Kernel("gemm", 0, 200)]).verdict == "right"
    assert told([]).verdict == "not here"
    assert told([Kernel("gemm", 0, 1)]).verdict == "not here"
