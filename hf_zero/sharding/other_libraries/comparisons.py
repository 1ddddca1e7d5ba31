"""`torch.testing.assert_close(model.weight, expected)`: torch compares rows with rows, or refuses to compare at all.

Here what is at rest is compared as the whole that it is in one process. `hf_zero.undo()` puts the original back.
"""

from __future__ import annotations

from typing import Any

from torch.testing import _comparison

from hf_zero.changes import Changes
from hf_zero.engine.parameters.at_rest.views import Readable

_changes = Changes()
_UNWRAPS = "_unwrap_dtensor_for_comparison"  # from torch 2.12 on, which looks at each before it compares


def install() -> None:
    """Let comparisons come by here; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.wrap(
            _comparison, _UNWRAPS if hasattr(_comparison, _UNWRAPS) else "not_close_error_metas", _compare_wholes
        )


def _compare_wholes(original: Any, actual: Any, expected: Any, **options: Any) -> Any:
    return original(_whole(actual), _whole(expected), **options)


def _whole(compared: Any) -> Any:
    return compared.full_tensor() if isinstance(compared, Readable) else compared
