"""`hf-zero trace`: record a few steps of a script, or say what a recorded trace says."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from hf_zero.cli.launch import launch
from hf_zero.errors import ConfigError, UsageError


def trace(argv: Sequence[str]) -> int:
    """Launch what stands behind `--` with a trace, or read the trace that is named.

    Args:
        argv: `[--plot FILE.png] FILE`, or `[--file FILE] [--plot FILE.png] -- ` and what `hf-zero launch` takes.

    Returns:
        The exit code: that of the launch.

    Raises:
        ConfigError: the picture needs what is not installed.
        UsageError: there is nothing to launch and nothing to read, or what is to be read is no trace.
    """
    given = list(argv)
    launched = given[given.index("--") + 1 :] if "--" in given else None
    args = parser(launched is not None).parse_args(given if launched is None else given[: given.index("--")])
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    if launched is not None:
        if not launched:
            raise UsageError("trace: name a script behind --, as for `hf-zero launch`")
        args.file = args.file.absolute()
        before = args.file.stat().st_mtime_ns if args.file.exists() else None
        os.environ["HF_ZERO_TRACE"] = str(args.file)
        code = launch(launched)
        if not args.file.exists() or args.file.stat().st_mtime_ns == before:
            return code or 1  # the run has said why
        if args.plot is not None:
            _draw(args.file, args.plot)
        return code
    from hf_zero.trace.report import in_words
    from hf_zero.trace.timeline import Timeline

    print(in_words(Timeline.read(args.file)))
    if args.plot is not None:
        _draw(args.file, args.plot)
    return 0


def _draw(file: Path, picture: Path) -> None:
    from hf_zero.trace.picture import draw
    from hf_zero.trace.timeline import Timeline

    draw(Timeline.read(file), picture)
    print(f"drawn to {picture}")


def parser(launches: bool) -> argparse.ArgumentParser:
    """What is understood before `--`, or where there is none."""
    made = argparse.ArgumentParser(
        prog="hf-zero trace",
        usage="hf-zero trace [--file FILE] [--plot FILE.png] -- SCRIPT ...\n       hf-zero trace [--plot FILE.png] FILE",
        description="Record what all ranks do in steps 3 to 5 of a script, or say where the time of a recorded trace went. "
        "Behind -- stands what `hf-zero launch` takes.",
    )
    if launches:
        made.add_argument("--file", type=Path, default=Path("trace.json"), help="of the trace (default: trace.json)")
    else:
        made.add_argument("file", type=Path, metavar="FILE", help="a trace that has been recorded")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the last step (needs matplotlib)")
    return made
