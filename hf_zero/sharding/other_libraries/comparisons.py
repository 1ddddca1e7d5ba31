"""`torch.testing.assert_close(model.weight, expected)`: torch compares rows with rows, or refuses to compare at all.

Here what is at rest is compared as the whole that it is in one process. `hf_zero.undo()` puts the original back.
"""

from __future__ import annotations

from typing import Any

from torch.testing import _comparison

from hf_zero.changes import Changes
from hf_zero.engine.parameters.views import Readable

_changes = Changes()


def install() -> None:
    """Let comparisons come by here; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.wrap(_comparison, "_unwrap_dtensor_for_comparison", _compare_wholes)


def _compare_wholes(original: Any, actual: Any, expected: Any) -> Any:
    return original(_whole(actual), _whole(expected))


def _whole(compared: Any) -> Any:
    return compared.full_tensor() if isinstance(compared, Readable) else compared
