"""Load an exported folder in plain transformers, and compare its held-out loss with the one reported in training.

`clm.py --verify_export` runs this in a process of its own. It also works alone, wherever the folder is copied to:

    python recipes/verify_export.py out
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer

NUM_BLOCKS = 128
LAUNCHER_VARIABLES = re.compile("ACCELERATE_|GROUP_|HF_ZERO_|LOCAL_|MASTER_|RANK|ROLE_|TORCHELASTIC_|WORLD_")
HELD_OUT_FILE = "held_out_loss.json"  # in the exported folder: the blocks, and what training reported on them


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, blocks: list[list[int]]) -> float:
    """Mean loss over equally long blocks of token ids, in nats a token.

    One block at a time: the mean does not depend on a batch size or on how many ranks there are.
    """
    model.eval()
    device = next(model.parameters()).device
    rows = torch.tensor(blocks, device=device).split(1)
    return float(sum(model(input_ids=row, labels=row).loss.item() for row in rows)) / len(rows)


def verify_export(trainer: Trainer, blocks: list[list[int]], how: str, is_fp32: bool) -> None:
    """Leave the sharded model's loss on held-out blocks in the export, and have a plain process compute it too.

    Every rank calls this after `trainer.save_model()`, because the forward gathers. Rank 0 starts the process, without
    the launcher's variables, and exits with its code if the losses differ.

    Args:
        trainer: after `save_model()`; `trainer.model` may be sharded.
        blocks: token ids, all equally long; the first 128 are used.
        how: where the trainer's loss comes from, in words: "under ZeRO stage 3".
        is_fp32: nothing was computed in half precision, so the losses must agree to 1e-4, not just 1e-2, of their size.
    """
    folder, blocks = str(trainer.args.output_dir), blocks[:NUM_BLOCKS]
    loss = held_out_loss(trainer.model, blocks)
    if not trainer.is_world_process_zero():
        return
    record = {
        "input_ids": blocks,
        "eval_loss": loss,
        "relative_tolerance": 1e-4 if is_fp32 and trainer.model.dtype == torch.float32 else 1e-2,
        "how": how,
    }
    Path(folder, HELD_OUT_FILE).write_text(json.dumps(record))
    plain = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    code = subprocess.run([sys.executable, __file__, folder], env=plain, check=False).returncode
    if code:
        sys.exit(code)


def greedy_sample(model: PreTrainedModel, folder: str, block: list[int], num_prompt: int = 32) -> str:
    """A held-out block's first tokens and what the model makes of them, for at most 3 seconds."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([block[:num_prompt]], device=model.device)
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=48,
        max_time=3.0,
    )[0]
    written = len(block[:num_prompt])
    return f"{tokenizer.decode(output[:written])!r} -> {tokenizer.decode(output[written:])!r}"


def main() -> int:
    """Compare; 0 if the losses agree, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what clm.py --verify_export left")
    parser.add_argument("--device", default="cpu", help="where to run it (default: cpu)")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()

    record = json.loads(Path(args.folder, HELD_OUT_FILE).read_text())
    model = AutoModelForCausalLM.from_pretrained(args.folder).to(args.device)
    loss, reported = held_out_loss(model, record["input_ids"]), record["eval_loss"]
    is_equal = math.isclose(loss, reported, rel_tol=record["relative_tolerance"])
    verdict = "export verified" if is_equal else "EXPORT DIFFERS"
    print(f"{verdict}: eval_loss {loss:.4f} in plain transformers, {reported:.4f} {record['how']}", flush=True)
    if not is_equal:
        return 1
    print(f"greedy sample: {greedy_sample(model, args.folder, record['input_ids'][0])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
