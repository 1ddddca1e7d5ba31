"""The names of torch, transformers, accelerate and peft that hf_zero stands on though nobody has promised them.

A failure here means that one has moved: read the upstream change, then the place in hf_zero that the row is about.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import accelerate
import accelerate.optimizer
import accelerate.state
import bitsandbytes
import peft.peft_model
import peft.tuners
import peft.tuners.tuners_utils as tuners_utils
import pytest
import safetensors.torch
import torch
import torch.utils.checkpoint
import transformers
import transformers.core_model_loading as loading
import transformers.distributed.sharding_utils as sharding
import transformers.masking_utils as masking
import transformers.modeling_utils as modeling
import transformers.trainer_jit_checkpoint as jit
from accelerate.utils import compare_versions
from huggingface_hub.serialization import _torch as hub_torch
from packaging.requirements import Requirement
from torch import nn
from torch._functorch._aot_autograd import runtime_wrappers as aot_wrappers
from torch._library import simple_registry
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.distributed.mixin import DistributedMixin
from transformers.generation.utils import GenerationMixin

from hf_zero.cli.doctor import is_newer_than_tested

COMPOSABLE = importlib.import_module("torch.distributed._composable.replicate")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Seam:
    """A name that hf_zero relies on.

    Attributes:
        owner: the module, class or object that has it.
        name: the attribute; "" for the owner itself.
        text: what its source must contain, spaces apart; "" where it has no Python source, or the name is enough.
        why: what in hf_zero stands on it.
    """

    owner: Any
    name: str
    text: str
    why: str


PLAN = [
    Seam(
        importlib.import_module("transformers.masking_utils"),
        "find_packed_sequence_indices",
        "if not is_tracing(packed_sequence_mask)",
        "activations: no mask of packed documents where there are no values",
    ),
    Seam(
        importlib.import_module("torch.distributed._functional_collectives"),
        "all_reduce",
        "torch.ops._c10d_functional.all_reduce(",
        "what ranks that share layers exchange",
    ),
]
QUANTISED = [
    Seam(torch._subclasses.fake_tensor.FakeTensorMode, "__init__", "allow_non_fake_inputs", "fake_tensors"),
    Seam(torch._C, "_current_autograd_node", "", "in_backward_of_an_operator"),
    Seam(torch.Tensor, "_make_subclass", "", "bytes in the class that they came in"),
    Seam(torch.Tensor, "_base", "", "the tensor that a view is one of"),
    Seam(bitsandbytes.nn.Params4bit, "__new__", "torch.Tensor._make_subclass(cls, data, requires_grad)", "as_shown"),
    Seam(bitsandbytes.nn.Linear4bit, "forward", "and self.support_avx512bf16_for_cpu", "no packing of what is shown"),
    Seam(bitsandbytes.autograd._functions.MatMul4Bit, "forward", "ctx.tensors = (None, B)", "nodes keep the bytes"),
]
ELASTIC = [
    Seam(Trainer, "_inner_training_loop", "self._run_epoch(", "healing: no step after the last"),
    Seam(
        importlib.import_module("accelerate.commands.launch"),
        "launch_command",
        "else: simple_launcher(args)",
        "healing: one process is started by torchrun's agent too",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent").LocalElasticAgent,
        "_monitor_workers",
        "failures={",
        "healing: asked after each failure",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent").LocalElasticAgent,
        "_stop_workers",
        "self._shutdown()",
        "healing: processes that save have more time",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.multiprocessing.api").SubprocessContext,
        "_poll",
        "or self._failures: self.close()",
        "healing: peers of a process that failed have less",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.multiprocessing.api").PContext,
        "close",
        "self._close(death_sig=death_sig, timeout=timeout)",
        "healing: peers of a process that failed have less",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.agent.server.api").SimpleElasticAgent,
        "_invoke_run",
        "run_result = self._monitor_workers(self._worker_group) state = run_result.state",
        "healing: it decides before the agent does",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.agent.server.api").SimpleElasticAgent,
        "_invoke_run",
        "if self._remaining_restarts > 0:",
        "healing: none are left where another start is in vain",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous").DynamicRendezvousHandler,
        "next_rendezvous",
        'os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1"',
        "healing: each start has a store of its own",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")._RendezvousExitOp,
        "__call__",
        "if ctx.node in ctx.state.participants:",
        "healing: a host whose processes failed leaves before it comes again",
    ),
    Seam(
        importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous").DynamicRendezvousHandler,
        "num_nodes_waiting",
        "self._state_holder.sync() return len(self._state_holder.state.wait_list)",
        "healing: who takes part is known where hosts wait",
    ),
    Seam(
        importlib.import_module("accelerate.commands.launch"),
        "multi_gpu_launcher",
        "distrib_run.run(args)",
        "healing: hosts meet anew for each start",
    ),
]
TORCH = [
    Seam(
        importlib.import_module("torch._dynamo.variables.builder").VariableBuilder,
        "_wrap",
        "type(value) not in config.nontraceable_tensor_subclasses",
        "let_compilers_pass_by",
    ),
    Seam(
        importlib.import_module("torch._dynamo.decorators"),
        "mark_static_address",
        "t._dynamo_static_input_type",
        "is_of_users: what compilers note of one tensor begins with _dynamo_",
    ),
    Seam(
        COMPOSABLE,
        "",
        "_localize_dtensor(module, ignored_params=ignored_params)",
        "wrappers: refused before it takes rows for parameters",
    ),
    Seam(COMPOSABLE, "", "import _localize_dtensor", "wrappers: looked up at the call"),
    Seam(
        torch.nn.utils.parametrize,
        "_register_parameter_or_buffer",
        "if isinstance(X, Parameter):",
        "is_registered: what a forward shows is not registered as a parameter",
    ),
    Seam(
        importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState,
        "init",
        "for module in modules:",
        "wrappers: what fully_shard calls first",
    ),
    Seam(DTensor, "_op_dispatcher", "", "torch_groups.forget_old_groups"),
    Seam(
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding,
        "cache_clear",
        "",
        "torch_groups.forget_old_groups",
    ),
    Seam(torch._C, "_clear_DTensor_sharding_propagator_cache", "", "torch_groups.forget_old_groups"),
    Seam(DTensor, "__new__", "", "rows_like: DTensor.__new__(DTensor, local, spec, requires_grad=...)"),
    Seam(
        torch.optim.Optimizer, "profile_hook_step", "args, kwargs = result", "a step's pre-hook hands in the stand-in"
    ),
    Seam(
        torch.optim.Optimizer, "profile_hook_step", "post_hook(self, args, kwargs)", "the optimizer itself comes back"
    ),
    Seam(torch.optim.Optimizer, "profile_hook_step", "self._optimizer_step_pre_hooks.values()", "ours stand last"),
    Seam(torch.optim.Optimizer, "profile_hook_step", "self._optimizer_step_post_hooks.values()", "ours stand first"),
    Seam(
        torch.optim.lr_scheduler, "", "_wrapped_by_lr_sched = True", "StandIn: a scheduler's `step` is of the real one"
    ),
    Seam(torch.serialization, "", "DEFAULT_PROTOCOL = 2", "tied weights are written once by `torch.save`"),
    Seam(
        importlib.import_module("torch.multiprocessing.reductions"),
        "storage_from_cache",
        "torch.UntypedStorage._new_with_weak_ptr(storage_ref.cdata)",
        "WeakTensor: plain tensors that are not kept alive",
    ),
    Seam(
        torch.optim.Optimizer, "_patch_step_function", "step.hooked = True", "step_of: the step without torch's hooks"
    ),
    Seam(
        torch.optim.Optimizer,
        "register_state_dict_post_hook",
        "_optimizer_state_dict_post_hooks",
        "states of all owners",
    ),
    Seam(torch.Tensor, "_is_zerotensor", "", "gradients without memory"),
    Seam(torch._C, "_ForceDispatchKeyGuard", "", "as_without_inference_mode"),
    Seam(torch._C, "_dispatch_tls_local_exclude_set", "", "as_without_inference_mode"),
    Seam(torch._C, "_dispatch_tls_local_include_set", "", "as_without_inference_mode"),
    Seam(torch.distributed.ProcessGroup, "_start_coalescing", "", "native: one launch of NCCL for a unit"),
    Seam(torch.distributed.ProcessGroup, "_end_coalescing", "", "the same"),
    Seam(torch.distributed.distributed_c10d, "_new_process_group_helper", "group_name: GroupName", "new_group_among"),
    Seam(
        torch.distributed.distributed_c10d,
        "_new_process_group_helper",
        "_get_default_group().bound_device_id",
        "_unbound",
    ),
    Seam(
        torch.distributed.distributed_c10d,
        "_new_process_group_helper",
        "split_from = _get_split_source(_get_default_group()",
        "_unbound",
    ),
    Seam(
        torch.distributed.distributed_c10d, "_new_process_group_helper", "pg.bound_device_id = device_id", "_device_for"
    ),
    Seam(
        torch.distributed.ProcessGroup, "_get_backend", "", "backend_on: a group may have one for each type of device"
    ),
    Seam(torch.distributed.distributed_c10d, "_get_default_store", "", "new_group_among"),
    Seam(torch.distributed.distributed_c10d, "new_group", "new_group_with_tag", "new_group_among"),
    Seam(torch.distributed.distributed_c10d, "_new_group_with_tag", "_world.pg_group_ranks[pg", "new_group_among"),
    Seam(torch.distributed.tensor._api, "", "r._spec = spec", "rows_like, replaced_by_whole: where a DTensor keeps it"),
    Seam(torch.distributed.tensor._api, "", "r._local_tensor = local_tensor", "local_of, set_local: its rows"),
    Seam(torch, "_amp_foreach_non_finite_check_and_unscale_", "", "rule: every rank hears of an overflow"),
    Seam(nn.Module, "__init__", "_non_persistent_buffers_set", "Buffers: what is saved with the model"),
    Seam(
        nn.parallel.DistributedDataParallel,
        "_set_params_and_buffers_to_ignore_for_model",
        "module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore",
        "shard_model: what DDP is told to ignore",
    ),
    Seam(
        torch.utils.checkpoint,
        "_recomputation_hook",
        "x = x.detach() if x.requires_grad else x",
        "what a recomputation keeps of frozen weights",
    ),
    Seam(torch.autograd.graph.saved_tensors_hooks, "__enter__", "self.pack_hook", "the same"),
    Seam(torch.ops.aten, "_to_copy", "", "operators: how it is run on tensors at rest"),
    Seam(torch.ops.aten, "_pin_memory", "", "operators: how it is run on tensors at rest"),
    Seam(torch.ops.aten, "_foreach_max", "", "operators: how it is run on tensors at rest"),
    Seam(torch.ops.aten, "_fused_adam_", "", "operators: how it is run on tensors at rest"),
    Seam(torch.ops.aten, "_fused_adamw_", "", "operators: how it is run on tensors at rest"),
    Seam(torch.ops.aten, "_fused_sgd_", "", "operators: how it is run on tensors at rest"),
    Seam(torch.ops.aten, "_fused_adagrad_", "", "operators: how it is run on tensors at rest"),
    Seam(
        torch.utils._foreach_utils, "_foreach_supported_types", "", "step_in_lists: clipping takes gradients in lists"
    ),
    Seam(torch.utils._foreach_utils, "_get_fused_kernels_supported_devices", "", "can_be_fused_on"),
    Seam(torch._C, "_get_privateuse1_backend_name", "", "can_be_fused_on"),
    Seam(torch.utils._foreach_utils, "_has_foreach_support", "in _foreach_supported_types", "step_in_lists"),
    Seam(torch.ops.aten, "_unsafe_view", "", "operators: a view, though torch does not call it one"),
    Seam(
        aot_wrappers,
        "_AnalyzeCustomOpInputOutputMode",
        "not in HANDLED_TYPES"
        if hasattr(aot_wrappers, "HANDLED_TYPES")
        else "type(underlying_tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl",
        "let_compiled_code_take",
    ),
    Seam(torch.ops.aten, "_foreach_norm", "", "operators: those of this family work place by place"),
    Seam(torch.distributed.tensor._dtensor_spec.TensorMeta, "_replace", "", "PartitionedTensor.like"),
    Seam(torch.Tensor, "_use_count", "", "nums_of_references: whether C++ holds a tensor"),
    Seam(torch.Tensor, "_make_wrapper_subclass", "", "View"),
    Seam(torch._C, "_disabled_torch_function_impl", "", "View"),
    Seam(torch._C, "_set_throw_on_mutable_data_ptr", "", "PartitionedTensor, View"),
    Seam(torch.ops.aten.add.Tensor, "_overloadname", "", "operators"),
    Seam(
        torch.ops.aten,
        "_scaled_dot_product_flash_attention_for_cpu",
        "",
        "plan.timing.work: what attention is counted by",
    ),
    Seam(torch.ops.aten.add.Tensor, "_schema", "", "operators: what an operator writes to"),
    Seam(torch._C, "_current_graph_task_id", "", "in_backward"),
    Seam(torch._C, "_dynamo", "", "compiles_frames"),
    Seam(torch._C._dynamo.eval_frame, "get_eval_frame_callback", "", "compiles_frames"),
    Seam(torch.autograd.Function, "apply", "", "apply_function"),
    Seam(torch._C, "_are_functorch_transforms_active", "", "in_function_transform"),
    Seam(
        torch._C._distributed_c10d.Backend, "_get_sequence_number_for_group", "", "progress: who has passed a barrier"
    ),
    Seam(torch.distributed.ProcessGroup, "_device_types", "", "the same"),
    Seam(torch.distributed.distributed_c10d._world, "group_count", "", "the same, of who makes a group"),
    Seam(torch.distributed.distributed_c10d, "_process_group_name", "_world.group_count += 1", "num_groups_begun"),
    Seam(torch._C, "_storage_Use_Count", "", "WholeWindow: whether a view of a whole tensor lives on"),
    Seam(torch.autograd.profiler, "_is_profiler_enabled", "", "is_profiling"),
    Seam(torch, "_foreach_div_", "", "sums of a unit are divided in one launch"),
    Seam(torch, "_foreach_copy_", "", "a unit's rows are copied into their places in one call"),
    Seam(torch, "_foreach_add_", "", "gradients of a unit are added up by one launch"),
    Seam(torch.autograd.Variable._execution_engine, "queue_callback", "", "after_backward"),
    Seam(torch.autograd.Variable, "_execution_engine", "", "after_backward"),
    Seam(torch.autograd, "_engine_run_backward", "", "a backward ends where it was called"),
    Seam(torch.autograd.graph, "_engine_run_backward", "run_backward(", "the same"),
    Seam(torch.autograd, "backward", "_engine_run_backward(", "every backward of a program comes through it"),
    Seam(torch.autograd, "grad", "_engine_run_backward(", "the same"),
    Seam(torch._C, "_stash_obj_in_tls", "", "what a backward carries to its threads"),
    Seam(torch._C, "_get_obj_in_tls", "", "the same"),
    Seam(torch._C, "_is_key_in_tls", "", "the same"),
    Seam(torch._C, "_autograd", "", "saved weights"),
    Seam(torch._C._autograd, "_push_saved_tensors_default_hooks", "", "saved weights"),
    Seam(torch._C._autograd, "_pop_saved_tensors_default_hooks", "", "saved weights"),
    Seam(torch._C._autograd, "_top_saved_tensors_default_hooks", "", "saved weights, under hooks of others"),
    Seam(torch._C, "_will_engine_execute_node", "", "backward(inputs=...)"),
    Seam(torch.Tensor, "_backward_hooks", "", "hooks of parameters that autograd never reaches"),
    Seam(torch.Tensor, "_post_accumulate_grad_hooks", "", "the same"),
    Seam(torch.ops.aten.add_.Tensor, "_schema", "", "which arguments an operation changes"),
    Seam(torch.Tensor, "_version", "", "writes inside a forward, and to what autograd has saved"),
    Seam(torch, "_foreach_copy_", "", "on parameters"),
    Seam(torch.ops.c10d, "_reduce_scatter_base_", "", "as what gives other values on each rank"),
    Seam(torch.ops.aten, "_foreach_zero_", "", "gradients under no_sync are cleared"),
    Seam(torch.Tensor, "grad_dtype", "", "gradients under no_sync, where the sum is wider than the parameter"),
    Seam(nn.Module, "__getattr__", "return _parameters[name]", "reads outside a call"),
    Seam(torch.UntypedStorage, "_cdata", "", "whether two tensors share memory"),
    Seam(torch, "_C", "", "see above"),
    Seam(torch.serialization, "_get_layout", "", "import of torch DCP: what its metadata may call"),
    Seam(torch.storage.UntypedStorage, "_cdata", "", "Tracer: which storage a meta tensor has"),
    Seam(nn.Module(), "_parameters", "", "whole tensors take the place of parameters while a module computes"),
    Seam(nn.Module(), "_buffers", "", "loading: buffers get memory of their own"),
    Seam(nn.Module(), "_forward_pre_hooks", "", "mark_dirty: whether an engine is to come"),
    Seam(sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm, "apply", "_orig", "what it leaves until a forward"),
    Seam(nn.Module(), "_forward_hooks", "", "our hook is the last, whenever users register theirs"),
    Seam(nn.Module, "register_parameter", "output = hook(self, name, param)", "Cutter: what a hook returns is kept"),
    Seam(nn.Module, "_call_impl", "_forward_hooks_always_called", "forward hooks run after an exception"),
    Seam(
        nn.Module,
        "_wrapped_call_impl",
        "return self._compiled_call_impl(*args, **kwargs)",
        "call_instead: what a call of a module runs",
    ),
    Seam(nn.Module, "__getstate__", 'state.pop("_compiled_call_impl", None)', "call_instead: copies leave it out"),
    Seam(torch.Tensor, "_make_wrapper_subclass", "", "put_off: a tensor without memory"),
    Seam(nn.modules.dropout, "_DropoutNd", "", "Work: all modules that draw random numbers"),
    Seam(nn.Module, "_apply", "torch.utils.swap_tensors(param, param_applied)", "other memory is an edit"),
    Seam(torch.amp.grad_scaler._MultiDeviceReplicator, "get", "non_blocking=True", "a scale that is waited for"),
    Seam(torch.amp.grad_scaler, "_MultiDeviceReplicator", "", "see above"),
    Seam(torch.amp.grad_scaler._MultiDeviceReplicator(torch.ones(())), "_per_device_tensors", "", "see above"),
    Seam(torch.nn.utils.parametrize, "_maybe_set", "torch.utils.swap_tensors(dest, src)", "no exchange with itself"),
    Seam(torch.utils, "swap_tensors", 'f"Expected use_count of {name}', "tensor_swaps: something that is alive"),
    Seam(nn.Parameter, "__new__", "t._is_param = True", "an alias of a parameter is none"),
    Seam(nn.Module, "load_state_dict", 'local_metadata["assign_to_params_buffers"] = assign', "assign=True copies"),
    Seam(
        nn.Parameter, "__new__", "t = data.detach().requires_grad_(requires_grad)", "WholeOnTouch: nn.Parameter(shard)"
    ),
    Seam(nn.RNNBase, "_init_flat_weights", "self._flat_weights", "loading an LSTM"),
    Seam(nn.RNNBase, "_init_flat_weights", "self._flat_weights_names", "whole tensors in an LSTM"),
    Seam(torch.utils._pytree, "tree_leaves", "", "tensors in a module's output"),
    Seam(torch.utils._pytree, "tree_map", "", "views of gathered memory in a module's output"),
    Seam(torch.utils._pytree, "tree_map_only", "", "operations on partitioned parameters"),
    Seam(torch._dynamo.eval_frame.OptimizedModule, "__init__", "_orig_mod", "ZeroCallback: the model inside"),
]

LOADING = [
    Seam(
        loading,
        "set_param_for_module",
        "param_value = torch.nn.Parameter(param_value, requires_grad=param_value.is_floating_point())",
        "what a file holds is trained, also where a constructor has frozen it",
    ),
    Seam(PreTrainedModel, "_keep_in_fp32_modules", "", "what computes in float32 where the rest is float16"),
    Seam(PreTrainedModel, "_keep_in_fp32_modules_strict", "", "the same, in bfloat16 too"),
    Seam(
        PreTrainedModel, "from_pretrained", "cls._load_pretrained_model( model, state_dict, checkpoint_files, load_", ""
    ),
    Seam(
        PreTrainedModel, "from_pretrained", "cls._finalize_model_loading(model, load_config, loading_info)", "LoadSeam"
    ),
    Seam(PreTrainedModel, "_load_pretrained_model", "expected_keys: list[str] | None = None", "adapters pass through"),
    Seam(PreTrainedModel, "_load_pretrained_model", "convert_and_load_state_dict_in_model", "the loader that slices"),
    Seam(PreTrainedModel, "_finalize_model_loading", "_move_missing_keys_from_meta_to_device", "missing weights"),
    Seam(PreTrainedModel, "_finalize_model_loading", "_initialize_missing_keys", "missing weights are drawn whole"),
    Seam(PreTrainedModel, "_from_config", "model = cls(config", "models made from a config are built for real"),
    Seam(PreTrainedModel, "_no_split_modules", "", "units"),
    Seam(PreTrainedModel, "base_model_prefix", "", "names of a checkpoint"),
    Seam(modeling, "load_state_dict", "map_location", "shapes of .bin files"),
    Seam(modeling, "load_state_dict", "state_dict[k] = f.get_tensor(k)", "bench load counts what is asked of it"),
    Seam(modeling, "load_state_dict", "with safe_open(checkpoint_path", "bench load puts a counter around it"),
    Seam(PreTrainedModel, "_load_pretrained_model", "file_pointer = safe_open(file", "bench load: likewise"),
    Seam(PreTrainedModel, "_load_pretrained_model", "file_pointer.get_slice(k)", "bench load: likewise"),
    Seam(modeling, "LoadStateDictConfig", "device_map", "every rank loads to its own device"),
    Seam(modeling, "LoadStateDictConfig", "hf_quantizer", "refused"),
    Seam(modeling, "LoadStateDictConfig", "device_mesh", "refused"),
    Seam(modeling, "LoadStateDictConfig", "weight_mapping", "which tensors are read whole"),
    Seam(loading, "convert_and_load_state_dict_in_model", "if is_dtensor(empty_param)", "who is sliced"),
    Seam(loading, "convert_and_load_state_dict_in_model", "HF_DEACTIVATE_ASYNC_LOAD", "tensors read whole, one by one"),
    Seam(
        loading, "set_param_for_module", "setattr(module_obj, param_name, param_value)", "Cutter sees every parameter"
    ),
    Seam(
        loading,
        "set_param_for_module",
        "ref._local_tensor.shape if is_dtensor(ref)",
        "mismatched shapes are read whole",
    ),
    Seam(loading, "rename_source_key", "", "names_to_read_whole follows it"),
    Seam(loading, "dot_natural_key", "", "names_to_read_whole follows it"),
    Seam(loading, "WeightRenaming", "", "names_to_read_whole"),
    Seam(loading, "WeightConverter", "", "names_to_read_whole"),
    Seam(loading.WeightConverter, "", "operations", "keeps_rows"),
    Seam(loading.WeightTransform, "", "source_patterns", "keeps_rows"),
    Seam(loading.WeightTransform, "", "target_patterns", "keeps_rows"),
    *(Seam(each, "__init__", "self.dim = dim", "keeps_rows") for each in (loading.Chunk, loading.Concatenate)),
    *(Seam(each, "__init__", "self.dim = dim", "keeps_rows") for each in (loading.Interleave, loading.MergeModulelist)),
    Seam(loading.Transpose, "__init__", "check_dims", "keeps_rows"),
    Seam(sharding.DtensorShardOperation, "shard_tensor", "get_local_rank()", "which rows are read"),
]

SEQUENCE = [
    Seam(
        masking, "_preprocess_mask_arguments", "position_ids: torch.Tensor | None,    layer_idx:", "arguments by place"
    ),
    Seam(masking, "create_causal_mask", "_preprocess_mask_arguments(config, inputs_embeds,", "masks of all tokens"),
    Seam(masking, "create_sliding_window_causal_mask", "_preprocess_mask_arguments(config,", "masks of all tokens"),
    Seam(masking, "create_causal_mask", "maybe_pad_block_sequence_ids(", "blocks are refused"),
    Seam(modeling.AttentionInterface, "get_interface", "return super().get(attn_implementation, default)", "eager too"),
    Seam(
        masking, "create_causal_mask", "mask_interface(        batch_size=batch_size,        q_length=q_length,", "rows"
    ),
    Seam(masking, "create_causal_mask", "ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]", "rows of masks"),
    Seam(masking, "sdpa_mask", "mask_function(*_non_vmap_expansion_sdpa(", "rows of masks"),
    Seam(PreTrainedModel, "_supports_attention_backend", "", "models whose attention can be replaced"),
    Seam(
        importlib.import_module("transformers.loss.loss_utils"), "ForCausalLMLoss", "shift_labels.view(-1)", "targets"
    ),
]
TRAINER = [
    Seam(TrainingArguments, "_VALID_DICT_FIELDS", "", "inline JSON for `zero`"),
    Seam(TrainingArguments, "__post_init__", "self.device\n", "the process group is made there"),
    Seam(TrainingArguments, "_setup_devices", 'strtobool(os.environ.get("ACCELERATE_USE_CPU"', "the CPU, unasked"),
    Seam(
        TrainingArguments, "_validate_args", "not self.use_cpu and not is_torch_bf16_gpu_available()", "bf16 on a CPU"
    ),
    Seam(DistributedMixin, "_is_distributed_loading_by_transformers", "", "model_methods.attach"),
    Seam(DistributedMixin, "is_distributed_loading_by_transformers", "_is_distributed_loading_by_transformers", ""),
    Seam(DistributedMixin, "gather_sharded_state_dict_for_save", "distributed_config is None", "does nothing for us"),
    Seam(Trainer, "__init__", "and not args.save_only_model", "an optimizer of a model sharded at load is refused"),
    Seam(Trainer, "__init__", "self._train_batch_size = args.train_batch_size", "samples a step"),
    Seam(Trainer, "__init__", 'getattr(model, "is_distributed_loading_by_transformers", False)', "copied once"),
    Seam(Trainer, "__init__", "self.call_model_init()", "model_init"),
    Seam(Trainer, "call_model_init", "", "model_init, again in train()"),
    Seam(Trainer, "__init__", "self.create_accelerator_and_postprocess()", "the loss scaler of fp16"),
    Seam(Trainer, "_hp_search_setup", "self.create_accelerator_and_postprocess()", "an accelerator each trial"),
    Seam(Trainer, "_save_checkpoint", "self._push_from_checkpoint(output_dir)", "pushed once it is committed"),
    Seam(Trainer, "train", "self._load_from_checkpoint(resume_from_checkpoint)", "the checkpoint is found before it"),
    Seam(Trainer, "_prepare_for_training", "evaluation_mode=True", "no DDP, but autocast"),
    Seam(Trainer, "_prepare_for_training", "self.create_optimizer()", "before prepare_model and on_train_begin"),
    Seam(Trainer, "_sync_replicated_trainable_parameters", "_replicated_grad_hook_registered", "stage 0"),
    Seam(Trainer, "_run_epoch", "self.accelerator.no_sync, model=model", "no_sync of the model"),
    Seam(Trainer, "_run_epoch", "self.args.max_grad_norm > 0", "clipping"),
    Seam(Trainer, "_maybe_log_save_evaluate", "grad_norm.item()", "the norm is the same on all ranks"),
    Seam(Trainer, "compute_loss", "self.accelerator.num_processes", "gradients are averaged, losses scaled up"),
    Seam(Trainer, "compute_loss", "unwrapped_model._get_name()", "the class of a model stays"),
    Seam(Trainer, "evaluation_loop", "prepare_model(model, evaluation_mode=True)", "evaluating before training"),
    Seam(Trainer, "save_model", "self._save(output_dir)", "all ranks come to _save"),
    Seam(Trainer, "_save_checkpoint", "self.save_model(output_dir, _internal_call=True)", "all ranks save weights"),
    Seam(Trainer, "_save_checkpoint", "run_dir = self._get_output_dir(trial=trial)", "written into a staged folder"),
    Seam(Trainer, "_save_checkpoint", "self._save_optimizer_and_scheduler(output_dir)", "written by all ranks"),
    Seam(Trainer, "_save_checkpoint", "self._save_scaler(output_dir)", "an error there is agreed on"),
    Seam(Trainer, "_save_checkpoint", "self._save_rng_state(output_dir)", "an error there is agreed on"),
    Seam(
        Trainer, "_save_checkpoint", "if os.path.exists(best_checkpoint_dir)", "its name is mended when it is committed"
    ),
    Seam(Trainer, "_prepare_for_training", "self._load_optimizer_and_scheduler(resume_from_checkpoint)", "ours"),
    Seam(Trainer, "_finalize_training", "self._load_best_model()", "ours"),
    Seam(jit.CheckpointManager, "_sigterm_handler", "threading.Timer(self.kill_wait, self._enable_checkpoint)", "ours"),
    Seam(
        jit.CheckpointManager, "setup_signal_handler", "self._original_sigterm_handler = signal.signal(", "heard from"
    ),
    Seam(jit.JITCheckpointCallback, "on_step_begin", "self.jit_manager.is_checkpoint_requested", "all ranks together"),
    Seam(modeling, "safe_save_file", "", "what save_pretrained would write"),
    Seam(
        PreTrainedModel, "save_pretrained", "safe_save_file(shard_state_dict, filename, metadata=metadata)", "recorded"
    ),
    Seam(safetensors.torch, "save_file", "_flatten_as_ptr(tensors,", "foreign_files: every tensor that is written"),
    Seam(safetensors.torch, "save", "_flatten_as_ptr(tensors,", "foreign_files: every tensor that is written"),
    Seam(safetensors.torch, "save_model", "_remove_duplicate_names(state_dict)", "foreign_files: tied tensors"),
    Seam(
        hub_torch,
        "save_torch_state_dict",
        "_clean_state_dict_for_safetensors(state_dict,",
        "foreign_files: tied tensors",
    ),
    Seam(hub_torch, "get_torch_storage_id", 'tensor.device.type == "meta"', "tensors of one storage stay in one file"),
    Seam(GenerationMixin, "generate", "synced_gpus", "ranks that have finished go on"),
    Seam(Seq2SeqTrainer, "prediction_step", "default_synced_gpus", "it says False, we say True"),
]

ACCELERATE = [
    Seam(accelerate.Accelerator, "__init__", "self._optimizers = []", "optimizers prepared before their model"),
    Seam(accelerate.Accelerator, "__init__", "self._models = []", "optimizers of no model are refused"),
    Seam(accelerate.Accelerator, "__init__", "self._schedulers = []", "save_state"),
    Seam(accelerate.Accelerator, "__init__", "self._dataloaders = []", "save_state"),
    Seam(accelerate.Accelerator, "__init__", "self._custom_objects = []", "save_state"),
    Seam(accelerate.Accelerator, "save_state", "self._save_model_state_pre_hook.values()", "called by save_state"),
    Seam(accelerate.Accelerator, "load_state", "self._load_model_state_pre_hook.values()", "called by load_state"),
    Seam(accelerate.Accelerator, "prepare", "_prepare_one", "prepare calls prepare_model and prepare_optimizer"),
    Seam(accelerate.Accelerator, "_prepare_one", "self.prepare_model(", ""),
    Seam(accelerate.Accelerator, "_prepare_one", "self.prepare_optimizer(", ""),
    Seam(accelerate.Accelerator, "prepare_model", "if not evaluation_mode:", "no DDP"),
    Seam(accelerate.Accelerator, "prepare_model", "DistributedType.MULTI_CPU", "no DDP on CPUs either"),
    Seam(accelerate.Accelerator, "no_sync", 'getattr(model, "no_sync", context)', "no_sync of the model"),
    Seam(
        accelerate.Accelerator,
        "skip_first_batches",
        "skip_first_batches(dataloader, num_batches",
        "the rest of an epoch",
    ),
    Seam(
        accelerate.data_loader,
        "skip_first_batches",
        "SkipBatchSampler(batch_sampler, skip_batches=num_batches)",
        "its batches are drawn again",
    ),
    Seam(
        accelerate.data_loader.DataLoaderShard, "__iter__", "self.iteration += 1", "wrapped: an epoch begins and ends"
    ),
    Seam(accelerate.data_loader.DataLoaderShard, "__iter__", "self.end_of_dataloader = True", "the last batch"),
    Seam(accelerate.data_loader.DataLoaderDispatcher, "__iter__", "self.end_of_dataloader = True", "wrapped, likewise"),
    Seam(accelerate.Accelerator, "save_model", "self.get_state_dict(model)", "every rank gets the dict"),
    Seam(
        accelerate.Accelerator,
        "_clip_grad_norm_dtensor_aware",
        "mesh_groups",
        "plain gradients beside partitioned ones",
    ),
    Seam(accelerate.optimizer.AcceleratedOptimizer, "__init__", "load_state_dict", "no exchange in state dict hooks"),
    Seam(accelerate.state.PartialState, "_prepare_backend", "MULTI_CPU", "a world of CPUs"),
    Seam(accelerate.state.AcceleratorState, "__init__", "ACCELERATE_USE_CPU", "use_cpu_without_accelerator"),
]

_TUNER = tuners_utils.BaseTuner

PEFT = [
    Seam(_TUNER, "inject_adapter", "self._create_and_replace(", "wrapped: modules are whole while they get adapters"),
    Seam(_TUNER, "_create_and_replace", "target: nn.Module", "which module that is"),
    Seam(_TUNER, "__init__", "self.inject_adapter(self.model, adapter_name,", "by way of it"),
    Seam(peft.peft_model.PeftModel, "add_adapter", "self.base_model.inject_adapter(", "by way of it"),
    Seam(peft.mapping, "inject_adapter_in_model", "tuner_cls(model, peft_config,", "by way of it"),
    Seam(
        peft.tuners.trainable_tokens.TrainableTokensLayer, "update_layer", "self.weight[self.token_indices[", "wrapped"
    ),
    Seam(peft.tuners.PromptEmbedding, "__init__", "config, word_embeddings", "wrapped"),
    Seam(peft.tuners.CPTEmbedding, "__init__", "config, word_embeddings", "wrapped"),
    Seam(tuners_utils, "onload_layer", "layer", "replaced: layers are whole while they are merged"),
    Seam(_TUNER, "merge_adapter", "with onload_layer(module):", "by way of it"),
    Seam(_TUNER, "unmerge_adapter", "with onload_layer(module):", "by way of it"),
    Seam(_TUNER, "_unload_and_optionally_merge", "with onload_layer(target):", "by way of it"),
    Seam(_TUNER, "merge_and_unload", "return self._unload_and_optionally_merge(", "wrapped"),
    Seam(_TUNER, "unload", "return self._unload_and_optionally_merge(", "wrapped"),
    Seam(peft.tuners.LoraModel, "add_weighted_adapter", "", "wrapped: adapters are whole while they are combined"),
    Seam(peft.tuners.IA3Model, "add_weighted_adapter", "", "wrapped"),
    Seam(
        peft.tuners.AdaLoraModel, "update_and_allocate", "self.rankallocator.update_and_allocate(self.model", "wrapped"
    ),
    Seam(
        peft.tuners.lora.layer.ParamWrapper, "_activate_lora", "_LoraFactorsProxy(*self.get_delta_factors(", "wrapped"
    ),
    Seam(peft.tuners.lora.layer, "_LoraParameterProxy", "", "what ParamWrapper adds, of several adapters"),
    Seam(peft.peft_model.PeftModel, "__init__", "model: torch.nn.Module,", "wrapped: it gets the engine"),
    Seam(
        peft.peft_model.PeftModel,
        "get_prompt_embedding_to_save",
        "prompt_encoder(prompt_tokens)",
        "encoders of prompts are whole while they are saved",
    ),
    Seam(peft.tuners.lora.layer.LoraLayer, "__init__", "self._caches", "what merging leaves there is put back"),
    Seam(modeling.PreTrainedModel, "save_pretrained", "_hf_peft_config_loaded", "names of the base, without adapters"),
]
_VLLM = importlib.import_module("trl.generation.vllm_generation").VLLMGeneration
_ONLINE_DPO = importlib.import_module("trl.experimental.online_dpo.online_dpo_trainer").OnlineDPOTrainer
_ASYNC = [
    importlib.import_module(f"trl.experimental.async_{each}.async_{each}_trainer") for each in ("grpo", "distillation")
]
TRL = [
    Seam(
        importlib.import_module("trl.trainer.sft_trainer").SFTTrainer,
        "compute_loss",
        "self._total_train_tokens += num_tokens_in_batch // self._tp_size",
        "counts of each batch once",
    ),
    Seam(_VLLM, "_iter_named_params", "name = self._fix_param_name_to_vllm(name)", "wrapped: what it yields is whole"),
    Seam(_VLLM, "sync_weights", "if self._weight_metadata is None:", "wrapped: shapes are known without a gather"),
    Seam(_VLLM, "sync_weights", "else: for _ in self._iter_named_params():", "ranks that only take part"),
    Seam(_VLLM, "sync_weights", "self.accelerator", "the rank that has the server's client"),
    Seam(
        _ONLINE_DPO, "_move_model_to_vllm_inner", "self.vllm_client.update_named_param(name, param.data)", "done here"
    ),
    Seam(
        _ONLINE_DPO, "_move_model_to_vllm_inner", "model_runner.model llm_model.load_weights([(name, param.data)])", ""
    ),
    Seam(_ONLINE_DPO, "_move_model_to_vllm", "self._move_model_to_vllm_inner()", "wrapped"),
    *[
        Seam(each, "_iter_vllm_named_params", "yield name, param", "wrapped: in the order of the stream")
        for each in _ASYNC
    ],
    *[
        seam
        for each, trainer in zip(_ASYNC, ("AsyncGRPOTrainer", "AsyncDistillationTrainer"), strict=True)
        for seam in (
            Seam(
                getattr(each, trainer), "_streaming_iter", "_iter_vllm_named_params(self.accelerator.unwrap_model", ""
            ),
            Seam(
                getattr(each, trainer), "_sync_weight_merged", "model = self.accelerator.unwrap_model(self.model)", ""
            ),
            Seam(getattr(each, trainer), "_sync_weight_merged", "model.merge_adapter()", "not done within"),
            Seam(getattr(each, trainer), "_sync_weight_merged", "model.unmerge_adapter()", "not done within"),
        )
    ],
]


def tensor_axis_seams() -> list[Seam]:
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import modeling_layers
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel as Dispatched
    from transformers.distributed.expert_parallel import MoEParamShard
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce as GatedNorms
    from transformers.distributed.tensor_parallel import TensorParallelLayer
    from transformers.integrations import moe

    return [
        Seam(moe, "use_experts_implementation", "self._is_expert_parallel = False", "experts are found by it"),
        Seam(moe, "use_experts_implementation", "self.config._experts_implementation, original_forward", "all of them"),
        Seam(torch.distributed.device_mesh.DeviceMesh, "_flatten", "", "norms over both axes are one exchange"),
        Seam(torch.distributed.tensor.placement_types, "_StridedShard", "split_factor", "rows of what is cut by rows"),
        Seam(modeling_layers.GradientCheckpointingLayer, "__init_subclass__", "self._gradient_checkpointing_func(", ""),
        Seam(ParallelismConfig, "_validate_accelerator", "self.total_size != accelerator.num_processes", "on CPUs too"),
        Seam(accelerate.Accelerator, "_prepare_tp", "_get_tensor_address", "not ours: empty rows have no address"),
        Seam(accelerate.Accelerator, "prepare", "args = self._prepare_tp(*args)", "nothing is left to prepare"),
        Seam(PreTrainedModel, "from_pretrained", "cls.prepare_distribute_model(", "it is given the axes"),
        Seam(
            PreTrainedModel,
            "from_pretrained",
            "cls.maybe_distribute_model(model, distributed_config, mesh_manager)",
            "",
        ),
        Seam(PreTrainedModel, "save_pretrained", 'getattr(self.config, "distributed_config", None)', "alone"),
        Seam(DistributedMixin, "maybe_distribute_model", "apply_fully_sharded_data_parallelism(", "left out"),
        Seam(DistributedMixin, "maybe_distribute_model", 'model, mesh_manager.get_mesh("tp"), tp_plan', "_Meshes"),
        Seam(
            GatedNorms, "install_forward", "dist.all_reduce(param.grad, group=mesh.get_group())", "summed in the graph"
        ),
        Seam(Trainer, "_build_accelerator_args", 'getattr(self.model, "tp_size", None)', "the Trainer's axes"),
        Seam(Trainer, "get_tp_size", "_tp_size", "samples a step"),
        Seam(
            Trainer, "_load_rng_state", "rng_state_{process_index}.pth", "one random state for ranks that share layers"
        ),
        Seam(torch.distributed.distributed_c10d, "_set_pg_timeout", "", "set_timeout"),
        Seam(torch._C._distributed_c10d.Backend.Options, "_timeout", "", "timeout_of"),
        Seam(
            torch.distributed,
            "destroy_process_group",
            "group: ProcessGroup |",
            "leaving: ranks stay before",
        ),
        Seam(torch.distributed.distributed_c10d, "_get_default_store", "", "program_store: roll calls"),
        Seam(PreTrainedModel, "_resolve_parallel_plans", "return tp_plan, ep_plan, fsdp_plan", "share_resized"),
        Seam(TensorParallelLayer, "install_forward", "module.forward = tp_forward", "SharedForward is what it makes"),
        Seam(Dispatched, "install_forward", "def install_forward(self, module, ep_mesh, *, tp_mesh", "SharedExperts"),
        Seam(
            Dispatched, "install_forward", "with self.context_around_forward(module, ep_mesh):", "parts are seen in it"
        ),
        Seam(MoEParamShard, "shard_param", "module.num_experts = global_num_experts // expert_parallel_size", ""),
        Seam(DistributedMixin, "maybe_distribute_model", 'ep_mesh = mesh_manager.get_mesh("ep")', "_Meshes"),
    ]


SEAMS = [*ELASTIC, *TORCH, *PLAN, *QUANTISED, *LOADING, *SEQUENCE, *TRAINER, *ACCELERATE, *PEFT, *TRL]
if compare_versions("transformers", ">=", "5.23"):
    SEAMS += tensor_axis_seams()


def source_of(seam: Seam) -> str:
    value = inspect.getattr_static(seam.owner, seam.name) if seam.name else seam.owner
    if isinstance(value, property):
        value = value.fget
    value = value.func if isinstance(value, functools.cached_property) else value
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return inspect.getsource(inspect.unwrap(value) if callable(value) else value)


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


_REMAPS = (
    ("create_causal_mask", "remap_positions_for_packed_sequence(mask_factory_function, position_ids")
    if compare_versions("transformers", ">=", "5.24")
    else ("packed_sequence_compatibility_function", "remap_positions_for_packed_sequence(mask_function, position_ids)")
)
# What transformers before 5.23 does otherwise, see `patch`.
SINCE_5_23 = [
    Seam(masking, _REMAPS[0], _REMAPS[1], "places of all tokens"),
    Seam(Trainer, "_run_epoch", "is_fsdp_managed_module(self.model)", "not ours: no_sync is used instead"),
    Seam(Trainer, "_save", "not self.args.should_save and not self.is_distributed_loading_by_transformers", ""),
    Seam(Trainer, "_save", "state_dict=state_dict, is_main_process=self.args.should_save", "our save_pretrained"),
]
if compare_versions("transformers", ">=", "5.23"):
    SEAMS += SINCE_5_23

# What torch 2.11 does otherwise.
SINCE_2_12 = [
    Seam(
        importlib.import_module("torch.distributed.elastic.agent.server.api").SimpleElasticAgent,
        "run",
        "self._shutdown(e.sigval, timeout=self._shutdown_timeout)",
        "healing: as much as where a scheduler ends them",
    ),
    Seam(
        torch.testing._comparison,
        "assert_close",
        "actual, expected = _unwrap_dtensor_for_comparison(actual, expected)",
        "comparisons: `assert_close` of what is at rest",
    ),
    Seam(torch.utils.checkpoint, "_CheckpointFrame", "_make_saved_tensor(arg, is_output=False)", "inputs pass hooks"),
]
IN_2_11 = [
    Seam(
        simple_registry.SimpleLibraryRegistry,
        "find",
        "res = SimpleOperatorEntry(qualname)",
        "dispatch_by_class: an entry for every operator",
    ),
    Seam(
        simple_registry,
        "find_torch_dispatch_rule",
        ".torch_dispatch_rules.find(",
        "dispatch_by_class: asked for each type",
    ),
    Seam(torch.testing._comparison, "assert_close", "not_close_error_metas(", "comparisons"),
    Seam(torch.utils.checkpoint, "_NoopSaveInputs", "ctx.save_for_backward(*tensors)", "inputs pass hooks"),
]
SEAMS += SINCE_2_12 if compare_versions("torch", ">=", "2.12") else IN_2_11


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{getattr(seam.owner, '__name__', '')}.{seam.name}")
def test_upstream_still_has(seam: Seam) -> None:
    assert not seam.name or hasattr(seam.owner, seam.name), seam.why
    if seam.text:
        assert squeeze(seam.text) in squeeze(source_of(seam)), seam.why


def test_peft_takes_an_unnamed_mesh_for_sharded_storage() -> None:
    """Else adapters on partitioned layers get the shapes of local rows."""
    assert 'if set(mesh_dim_names) <= {"fsdp"}:' in inspect.getsource(tuners_utils._get_in_out_features)


def foreign_names(tree: ast.AST) -> Iterator[str]:
    """Names with one underscore in front: of attributes, and of strings that look like one."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name):
            yield name


def own_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@pytest.mark.skipif(compare_versions("transformers", "<", "5.23"), reason="the table has rows of transformers 5.23")
def test_every_private_name_in_use_is_in_the_table() -> None:
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in (ROOT / "hf_zero").rglob("*.py")}
    own = {name for tree in trees.values() for name in own_names(tree)}
    known = {
        name for seam in (*SEAMS, *SINCE_2_12, *IN_2_11) for name in re.findall(r"\b_\w+", f"{seam.name} {seam.text}")
    } | {
        "_getframe",
        "_current_frames",
        "_exit",
        "_foreach",
        "_foreach_",
        "_dynamo_",
    }
    used = {(name, file) for file, tree in trees.items() for name in foreign_names(tree)}
    strange = sorted((name, file) for name, file in used if name not in own | known and not name.startswith("_zero_"))
    assert strange == []


@pytest.mark.parametrize("package", ["torch", "transformers", "accelerate", "datasets", "safetensors", "peft", "trl"])
def test_installed_version_lies_in_the_declared_range(package: str) -> None:
    """The oldest release is declared; the newest is the one that somebody has run `.ci/versions newest` with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["all-recipes"]]
    declared = [each.specifier for each in map(Requirement, texts) if each.name == package]
    version = metadata.version(package)
    assert declared and all(each.contains(version.split("+")[0], prereleases=True) for each in declared)
    assert {bound.operator for each in declared for bound in each} == {
        ">="
    }  # who has a newer one can install beside it
    assert not is_newer_than_tested(package, version), (
        "look at what it changes, then raise TESTED and the versions in guide/limits.md"
    )


def test_the_versions_are_those_that_are_imported() -> None:
    assert transformers.__version__ == metadata.version("transformers")
    assert accelerate.__version__ == metadata.version("accelerate")
    assert torch.__version__.split("+")[0] == metadata.version("torch").split("+")[0]
