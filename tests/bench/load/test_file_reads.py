"""What a process asks of safetensors files is counted."""

from pathlib import Path

import safetensors
import torch
import transformers.modeling_utils as modeling
from safetensors.torch import save_file

from hf_zero.bench.load.file_reads import ReadCount


def test_slices_and_tensors_count_with_their_bytes(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.safetensors", torch.arange(12.0).reshape(4, 3)
    save_file({"whole": whole, "half": whole.bfloat16()}, path)
    with ReadCount() as reads:
        file = modeling.safe_open(path, framework="pt")
        assert sorted(file.keys()) == ["half", "whole"]
        rows = file.get_slice("whole")
        assert rows.get_shape() == [4, 3] and reads.num_bytes is None
        assert torch.equal(rows[1:3], whole[1:3])
        assert reads.num_bytes == 2 * 3 * 4
        with safetensors.safe_open(path, framework="pt") as other:
            assert torch.equal(other.get_tensor("half"), whole.bfloat16())
        assert reads.num_bytes == 2 * 3 * 4 + 12 * 2


def test_the_reader_is_put_back() -> None:
    before = safetensors.safe_open, modeling.safe_open
    with ReadCount():
        assert modeling.safe_open is not before[1] and safetensors.safe_open is not before[0]
    assert (safetensors.safe_open, modeling.safe_open) == before
