"""A device that does everything as late, or as early, as CUDA permits: what a GPU forgives most of the time shows on every run.

`streams.h` says how it works, `device.cpp` has its memory and operations, `exchanges.cpp` what NCCL would do, and refuse.
`python -m tests.gpu.late.device` builds it; `python -m tests.gpu.late.run NAME late` under a launcher runs a case of
`tests/gpu/cases.py` on it, or puts in a mistake of `tests/gpu/mistakes.py`.
"""
