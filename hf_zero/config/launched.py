"""What was asked of the launcher beside what a script says itself."""

from __future__ import annotations

import os

from hf_zero.config import files
from hf_zero.config.zero_config import ZeroConfig


def tell_where_script_differs(config: ZeroConfig, said_by: str) -> None:
    """Say on rank 0 that a script's own configuration counts, where the launcher was given another one.

    Args:
        config: what the script says.
        said_by: where it does.
    """
    launched = os.environ.get(files.CONFIG_VARIABLE)
    if launched and ZeroConfig.load(None) != config:
        files.show_once(
            f"hf_zero: {said_by} of the script counts (stage {config.stage}), not the launcher's --zero or "
            f"{files.CONFIG_VARIABLE} ({launched})\n"
        )
