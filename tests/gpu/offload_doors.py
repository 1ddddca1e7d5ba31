"""What users do with a model beside training, with rows in host memory: the same bits as without."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from tests.gpu.offload import places
from tests.gpu.training import BLOCKS, LLAMA, adamw, alike, batch_of, train
from tests.models import CASES, Case, make_model

Config = dict[str, Any]


def _model(device: torch.device, config: Config, case: Case = LLAMA, units: bool = True) -> nn.Module:
    model = make_model(case).to(device)
    zero.shard_model(model, {**(BLOCKS if units else {"timeout_s": 60}), **config})
    return model


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _flat(tensors: Any) -> Tensor:
    return torch.cat([_whole(each).float().reshape(-1) for each in tensors])


def lora(device: torch.device, config: Config, folder: str) -> Tensor:
    """Adapters over frozen weights, and what is saved of them."""
    import peft

    model = make_model(LLAMA).to(device)
    torch.manual_seed(5)
    lora_config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = peft.get_peft_model(model, lora_config)
    zero.shard_model(model, {**BLOCKS, **config})
    trained = [p for p in model.parameters() if p.requires_grad]
    found = train(model, device, range(4), torch.optim.AdamW(trained, 1e-2, fused=True))
    model.save_pretrained(folder)
    dist.barrier()
    saved = load_file(f"{folder}/adapter_model.safetensors")
    return torch.cat([found.cpu().float(), _flat(saved[name] for name in sorted(saved))])


def generate(device: torch.device, config: Config, folder: str) -> Tensor:
    """Tokens between steps, of inputs where the model says that it is."""
    model = _model(device, config)
    optimizer = adamw(model)
    losses = train(model, device, range(2), optimizer)
    model.eval()
    ids = torch.arange(1, 5)[None].to(device)
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
    assert tokens.device == device
    again = model.generate(ids.to(model.device), max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()
    return torch.cat(
        [each.float().cpu().view(-1) for each in (losses, tokens, again, train(model, device, range(2, 4), optimizer))]
    )


def edits(device: torch.device, config: Config, folder: str) -> Tensor:
    """Writes between steps, in all ways."""
    model = _model(device, config)
    optimizer = adamw(model)
    losses = [train(model, device, range(2), optimizer)]
    with zero.GatheredParameters(model.lm_head.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            model.lm_head.weight.data[3].mul_(2)
    losses.append(train(model, device, range(2, 3), optimizer))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.model.norm.weight.data.add_(0.1)
        for param in model.parameters():
            param.data = param.data * 0.99
    losses.append(train(model, device, range(3, 4), optimizer))
    with zero.GatheredParameters(model):
        losses.append(_flat(model.parameters()))
        assert all(not isinstance(p, DTensor) for p in model.parameters())
    kept = copy.deepcopy(model)
    losses.append(train(kept, device, range(4, 5)))
    losses.append(_flat(p for p in model.parameters()))
    return torch.cat([each.float().cpu().view(-1) for each in losses])


def gathered_training(device: torch.device, config: Config, folder: str) -> Tensor:
    """A step inside `GatheredParameters`."""
    model = _model(device, config)
    optimizer = adamw(model)
    with zero.GatheredParameters(model):
        loss = model(**batch_of(0, dist.get_rank(), device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([loss.detach().cpu().view(-1), train(model, device, range(1, 3), optimizer).cpu()])


def state_dicts(device: torch.device, config: Config, folder: str) -> Tensor:
    """What was taken is loaded again."""
    model = _model(device, config)
    optimizer = adamw(model)
    train(model, device, range(2), optimizer)
    state = model.state_dict()
    whole = {name: _whole(value).clone() for name, value in state.items()}
    kept = copy.deepcopy(optimizer.state_dict())
    losses = train(model, device, range(2, 4), optimizer)
    model.load_state_dict(whole)
    optimizer.load_state_dict(kept)
    again = train(model, device, range(2, 4), optimizer)
    assert torch.equal(losses, again), (losses, again)
    model.load_state_dict(whole, assign=True)
    third = train(model, device, range(4, 5), optimizer)
    return torch.cat([_flat(whole.values()), losses.cpu(), again.cpu(), third.cpu()])


def saved(device: torch.device, config: Config, folder: str) -> Tensor:
    """Files of `save_pretrained`."""
    model = _model(device, config)
    train(model, device, range(2))
    model.save_pretrained(folder)
    dist.barrier()
    found = load_file(f"{folder}/model.safetensors")
    return _flat(found[name] for name in sorted(found))


def gradients(device: torch.device, config: Config, folder: str) -> Tensor:
    """Hooks, reads and edits of gradients; a term of the loss over the parameters at rest, where ranks can meet for it."""
    model = _model(device, config)
    has_term = dist.get_world_size() == 1
    if not has_term and any(p.device != device for p in model.parameters()):
        with pytest.raises(zero.UsageError, match="offloaded to host memory has its backward beside the model's"):
            sum(p.square().sum() for p in model.parameters()).backward()
    optimizer, seen = adamw(model), []
    weight = model.lm_head.weight
    weight.register_hook(lambda grad: seen.append(grad.detach().clone()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(_whole(p.grad).clone()))
    for step in range(4):
        loss = model(**batch_of(step, dist.get_rank(), device)).loss
        if step and has_term:
            loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        seen.append(loss.detach())
        seen.append(_flat(p.grad for p in model.parameters()))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.mul_(1.5)
            if step == 2:
                weight.grad = torch.ones(weight.shape, device=device)
        norms = [p.grad.norm() for p in model.parameters()]
        seen.append(torch.stack([_whole(n) for n in norms]))
        seen.append(_whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return torch.cat([each.cpu().float().view(-1) for each in seen])


def no_sync(device: torch.device, config: Config, folder: str) -> Tensor:
    """Micro-batches that are reduced later."""
    model = _model(device, config)
    optimizer, losses = adamw(model), []
    for step in range(3):
        with model.no_sync():
            loss = model(**batch_of(10 + step, dist.get_rank(), device)).loss
            loss.backward()
            losses.append(loss.detach())
        loss = model(**batch_of(step, dist.get_rank(), device)).loss
        loss.backward()
        losses.append(loss.detach())
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([_whole(x).view(()) for x in losses])


def optimizers(device: torch.device, config: Config, folder: str) -> Tensor:
    """Others than fused AdamW."""
    losses = []
    for make in (
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=False),
        lambda ps: torch.optim.Adagrad(ps, 0.01, foreach=False),
        lambda ps: torch.optim.AdamW(ps, 0.01),
        lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    ):
        model = _model(device, config)
        optimizer = make(model.parameters())
        losses.append(train(model, device, range(3), optimizer).cpu())
    return torch.cat(losses)


def frozen(device: torch.device, config: Config, folder: str) -> Tensor:
    """Parameters that are frozen for a while."""
    model = _model(device, config)
    optimizer, losses = adamw(model), []
    losses.append(train(model, device, range(1), optimizer))
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    losses.append(train(model, device, range(1, 3), optimizer))
    model.requires_grad_(True)
    losses.append(train(model, device, range(3, 5), optimizer))
    return torch.cat(losses).cpu()


def moved(device: torch.device, config: Config, folder: str) -> Tensor:
    """`model.to(device)`, `.to(dtype)` of what is partitioned, copies and evaluation."""
    model = _model(device, config)
    optimizer = adamw(model)
    losses = [train(model, device, range(1), optimizer)]
    model.to(device)
    losses.append(train(model, device, range(1, 3), optimizer))
    model.eval()
    with torch.no_grad():
        losses.append(model(**batch_of(7, dist.get_rank(), device)).loss.view(1))
    with torch.inference_mode():
        losses.append(model(**batch_of(7, dist.get_rank(), device)).loss.view(1).clone())
    model.train()
    losses.append(train(model, device, range(3, 4), optimizer))
    assert model.device == device, model.device
    return torch.cat([each.cpu() for each in losses])


def averages(device: torch.device, config: Config, folder: str) -> Tensor:
    """An average of the weights beside them."""
    model = _model(device, config)
    optimizer = adamw(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    losses = []
    for step in range(3):
        losses.append(train(model, device, range(step, step + 1), optimizer))
        average.update_parameters(model)
    with torch.no_grad():
        losses.append(average(**batch_of(7, dist.get_rank(), device)).loss.view(1))
    return torch.cat([each.cpu() for each in losses])


def kinds(device: torch.device, config: Config, folder: str) -> Tensor:
    """Other models."""
    losses = []
    for name in ("gpt2", "t5", "bert"):
        case = CASES[name]
        model = _model(device, config, case, units=False)
        losses.append(train(model, device, range(3), case=case))
    return torch.cat(losses).cpu()


def whole_parameters(device: torch.device, config: Config, folder: str) -> Tensor:
    """What an engine for inference is handed."""
    model = _model(device, config)
    train(model, device, range(2))
    return _flat(weight.clone() for _, weight in zero.whole_parameters(model, dtype=torch.bfloat16))


DOORS: dict[str, Callable[[torch.device, Config, str], Tensor]] = {
    each.__name__: each
    for each in (
        lora,
        generate,
        edits,
        gathered_training,
        state_dicts,
        saved,
        gradients,
        no_sync,
        optimizers,
        frozen,
        moved,
        averages,
        kinds,
        whole_parameters,
    )
}
_ON_PLAIN_MASTERS = ("gathered_training",)  # computes with what is at rest, in its dtype


def offload_doors(device: torch.device, folder: str) -> dict[str, Any]:
    """Each door gives the bits of a run that offloads nothing."""
    for (name, door), stage in itertools.product(DOORS.items(), (1, 2, 3)):
        config = {"stage": stage, "compute_dtype": "float32" if name in _ON_PLAIN_MASTERS else "bfloat16"}
        expected = door(device, config, f"{folder}/{name}")
        for place in places(stage):
            found = door(device, {**config, "offload": place}, f"{folder}/{name}")
            assert alike(found, expected, device), (name, config, place, (found - expected).abs().max())
    return {}


OF_TWO = (offload_doors,)
