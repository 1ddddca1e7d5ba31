"""Train a model whose layers are divided over the stages of a pipeline, each stage under ZeRO over its own ranks.

    accelerate launch --config_file configs/accelerate/cpu4.yaml recipes/pipeline.py --zero configs/zero1.yaml \
        --stages 2 --output_dir out/pipeline

Four ranks make two stages of two ranks. `--chunks 2` gives every rank two parts of the model (interleaved 1F1B). The export
is the folder that `save_pretrained` of the whole model writes. The loop is `torch.distributed.pipelining`'s.
"""

from __future__ import annotations

import argparse

import inputs
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import set_seed
from history import History
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_zero as zero
from hf_zero.integrations.pipeline import ZeroStage, clip_grad_norm_, keep_stage, save_stages


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", help="ZeRO configuration: a stage (0 to 3), or a file (default: $HF_ZERO_CONFIG)")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--stages", type=int, default=2, help="groups of ranks, one behind the other")
    parser.add_argument("--chunks", type=int, default=1, help="parts of the model a rank; above 1: interleaved")
    parser.add_argument("--model_name_or_path", help="folder or hub name; default: a small Llama")
    parser.add_argument("--dataset_name", help="file or hub name; it has a column 'text'")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=4, help="of one micro-batch")
    parser.add_argument("--micro_batches", type=int, default=4, help="of a step")
    parser.add_argument("--block_size", type=int, default=128, help="tokens of an example")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--plot", action="store_true", help="draw loss and memory as history.png")
    args = parser.parse_args()

    state = PartialState(cpu=not torch.accelerator.is_available())
    ranks, rest = divmod(state.num_processes, args.stages)
    if rest:
        raise SystemExit(f"--stages {args.stages} does not divide the {state.num_processes} processes")
    mesh = init_device_mesh(state.device.type, (args.stages, ranks), mesh_dim_names=("stage", "rank"))
    set_seed(0)
    with state.main_process_first():
        train, _ = inputs.load_rows(args.dataset_name, ({"text": text} for _, text in inputs.docstrings()))
    name = args.model_name_or_path or inputs.small_llama(f"{args.output_dir}/start", train["text"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    blocks = blocks_of(tokenizer(list(train["text"][:2000]))["input_ids"], tokenizer.eos_token_id, args.block_size)

    # Stage i of the pipeline lies on the ranks of row i; with two chunks they also have stage i + --stages, and so on.
    num_parts = args.stages * args.chunks
    indices = range(mesh["stage"].get_local_rank(), num_parts, args.stages)
    models = [load_stage(name, index, num_parts, args.zero, mesh) for index in indices]
    parts = [
        ZeroStage(model, index, num_parts, state.device, group=mesh.get_group("stage"))
        for index, model in zip(indices, models, strict=True)
    ]
    how = {"n_microbatches": args.micro_batches, "loss_fn": loss_of}
    schedule = Schedule1F1B(parts[0], **how) if args.chunks == 1 else ScheduleInterleaved1F1B(parts, **how)
    optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()], lr=args.learning_rate)

    history = History(args.plot)
    batch = args.batch_size * args.micro_batches
    is_first, is_last = (index in indices for index in (0, num_parts - 1))
    for step in range(args.max_steps):
        first = (step * ranks + mesh["rank"].get_local_rank()) * batch  # the stages of a pipeline see the same batch
        rows = blocks[torch.arange(first, first + batch) % len(blocks)].to(state.device)
        losses: list[Tensor] = []
        schedule.step(*[rows] if is_first else [], target=rows if is_last else None, losses=losses if is_last else None)
        norm = clip_grad_norm_(models, 1.0, mesh.get_group("stage"))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean() if is_last else torch.zeros((), device=state.device)
        dist.all_reduce(loss)  # the ranks of the last stage have it
        if step % 10 == 0 or step == args.max_steps - 1:
            state.print(f"step {step + 1}: loss {loss.item() / ranks:.4f}, gradient norm {norm.item():.3f}")
            history.log(step + 1, loss.item() / ranks)

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=models[0].dtype)
    save_stages(models, whole, args.output_dir)  # all ranks, each its own rows; plain from_pretrained loads it
    if state.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    history.finish(args.output_dir)
    state.destroy_process_group()


def load_stage(name: str, index: int, num_parts: int, config: str | None, mesh: object) -> PreTrainedModel:
    """One stage of the model, under ZeRO over the ranks of its row; each rank reads its own rows only."""
    with zero.Init(config, mesh=mesh["rank"]):
        model = AutoModelForCausalLM.from_pretrained(name)
    keep_stage(model.train(), index, num_parts)
    zero.shard_model(model)
    return model


def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
    """The mean loss of one micro-batch."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def blocks_of(texts: list[list[int]], end: int, size: int) -> Tensor:
    """The texts one behind the other, cut into blocks of equal length."""
    tokens = torch.tensor([token for text in texts for token in [*text, end]])
    return tokens[: len(tokens) // size * size].view(-1, size)


if __name__ == "__main__":
    main()
