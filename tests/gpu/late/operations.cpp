// Operations on the device: those of the CPU, on the same memory, when their stream comes to them.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_set>

#include "shapes.h"

namespace late {

Tensor host_of(const Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (!tensor.numel() || !tensor.storage().data()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  c10::DataPtr memory(const_cast<void*>(tensor.storage().data()), c10::Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(memory), nullptr, false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return host;
}

namespace {

// Of a layer norm in half precision, a device keeps mean and deviation in float32; the CPU expects them in the input's dtype.
void convert_statistics(const c10::OperatorHandle& op, Values& stack) {
  if (op.schema().name() != "aten::native_layer_norm_backward") return;
  const auto dtype = stack[1].toTensor().scalar_type();
  if (stack[5].isTensor() && stack[5].toTensor().defined() && stack[5].toTensor().scalar_type() != dtype) return;
  for (int i : {3, 4}) stack[i] = stack[i].toTensor().to(dtype);
}

void run_on_host(const c10::OperatorHandle& op, Values& stack) {
  convert_statistics(op, stack);
  at::AutoDispatchBelowADInplaceOrView below;  // whoever happens to run it, in whatever mode
  c10::impl::ExcludeDispatchKeyGuard plain(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) | c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// Indices may be on the host; fused optimizers' counts of steps are checked by torch itself.
const std::unordered_set<std::string> kMayMix = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

// The device that an operation runs on: that of its tensors, or the one that it is asked to make them on.
c10::DeviceIndex device_of(const c10::OperatorHandle& op, const Values& given) {
  int found = -1;
  bool has_host = false;
  const Convert look = [&](const Tensor& tensor) {
    if (is_sim(tensor)) {
      TORCH_CHECK(found < 0 || found == tensor.device().index(), op.schema().name(), " mixes tensors of two devices");
      found = tensor.device().index();
    }
    has_host |= tensor.defined() && tensor.device().type() == at::kCPU && tensor.dim() > 0;
    return tensor;
  };
  for (auto value : given) convert(value, look, at::kCPU);
  const auto& name = op.schema().name();
  TORCH_CHECK(found < 0 || !has_host || kMayMix.count(name), name, " mixes tensors of two devices");
  for (const auto& value : given) {
    if (found < 0 && value.isDevice() && value.toDevice().type() == kSim && value.toDevice().has_index()) {
      found = value.toDevice().index();
    }
  }
  return found < 0 ? current_device : found;
}

bool waits(const Facts& facts, const Values& given) {
  if (facts.waits || !facts.waits_for_masks) return facts.waits;
  for (const std::optional<Tensor> index : given[1].toOptionalTensorList()) {
    if (!index || !index->defined()) continue;
    if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) return true;
  }
  return false;
}

// As on CUDA, what is drawn is settled when the operation is queued, and not when it runs.
void draw_seed(int place, Values& host) {
  if (place < 0) return;
  auto from = host[place].isNone() ? generator() : host[place].toGenerator();
  std::lock_guard<std::mutex> guard(from.mutex());
  host[place] = at::detail::createCPUGenerator(from.get<at::CPUGeneratorImpl>()->random64());
}

Tensor by_value(const Tensor& tensor) {  // numbers of the host are part of a launch
  return is_sim(tensor) ? host_of(tensor) : tensor.defined() ? as_number(tensor, tensor.clone()) : tensor;
}

// Make what an operation returns; false where its shapes are known only once it has run.
bool make_results(const c10::OperatorHandle& op, const Facts& facts, const Values& given, Values& results) {
  const auto shapes = shapes_of(op, given, facts.generator);
  if (!shapes) return false;
  for (size_t r = 0; r < facts.alias.size(); r++) {
    if (facts.alias[r] < 0) {
      results[r] = (*shapes)[r].make();
    } else if (given[facts.alias[r]].isTensor()) {
      auto written = given[facts.alias[r]].toTensor();
      if (written.sizes() != (*shapes)[r].sizes[0]) written.resize_((*shapes)[r].sizes[0]);
    }
  }
  return true;
}

void run_now(const c10::OperatorHandle& op, const Facts& facts, const Values& given, Values& results) {
  const auto name = op.schema().name();
  const auto& alias = facts.alias;
  wait_here(name);
  Values host = converted(given, host_of, at::kCPU);
  draw_seed(facts.generator, host);
  run_on_host(op, host);
  for (size_t r = 0; r < alias.size(); r++) {
    if (alias[r] < 0) {
      results[r] = host[r];
      convert(results[r], [&](const Tensor& tensor) {
        auto made = new_like(tensor);
        wait_here(name);  // its memory may be about to be poisoned
        if (tensor.defined() && tensor.numel()) host_of(made).copy_(tensor);
        return made;
      }, at::kCPU);
    } else if (given[alias[r]].isTensor() && given[alias[r]].toTensor().sizes() != host[r].toTensor().sizes()) {
      given[alias[r]].toTensor().resize_(host[r].toTensor().sizes());
      wait_here(name);
      host_of(given[alias[r]].toTensor()).copy_(host[r].toTensor());
    }
  }
}

void run_later(const c10::OperatorHandle& op, const Facts& facts, const Values& given, const Values& results) {
  Values host = converted(given, by_value, at::kCPU), targets = converted(results, host_of, at::kCPU);
  draw_seed(facts.generator, host);
  Lock lock;
  push(current(), {[op, host, targets]() mutable {
    run_on_host(op, host);
    for (size_t r = 0; r < targets.size(); r++) {
      if (targets[r].isTensor() && targets[r].toTensor().defined()) targets[r].toTensor().copy_(host[r].toTensor());
      if (!targets[r].isTensorList()) continue;
      auto from = host[r].toTensorVector(), to = targets[r].toTensorVector();
      for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i]);
    }
    return true;
  }});
}

// Any operation: that of the CPU, on the same memory, when its stream comes to it.
void queue(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const Values given(stack->end() - count, stack->end());
  c10::DeviceGuard guard(c10::Device(kSim, device_of(op, given)));
  const auto& facts = facts_of(op);
  const auto& alias = facts.alias;
  Values results(alias.size());
  if (waits(facts, given) || (facts.makes && !make_results(op, facts, given, results))) {
    run_now(op, facts, given, results);
  } else {
    run_later(op, facts, given, results);
  }
  stack->resize(stack->size() - count);
  for (size_t r = 0; r < alias.size(); r++) stack->push_back(alias[r] < 0 ? results[r] : given[alias[r]]);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory(), kKeys, c10::dtype_or_default(dtype));
}

// A tensor of the program's in a task: see `let_go`.
std::shared_ptr<Tensor> kept(const Tensor& tensor) {
  return {new Tensor(tensor), [](Tensor* held) {
    let_go.push_back(std::move(*held));
    delete held;
  }};
}

// The host's side of a copy is read or written late only where a device could do so: in pinned memory, without blocking.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  c10::DeviceGuard guard(is_sim(target) ? target.device() : source.device());
  auto from = host_of(source), to = host_of(target);
  if (!source.numel()) return target;
  if (!is_sim(target) && !(non_blocking && is_pinned(target.data_ptr()))) {
    wait_here("a copy to the host");
    to.copy_(from);
    return target;
  }
  if (!is_sim(source) && !(non_blocking && is_pinned(source.data_ptr()))) {
    TORCH_CHECK(!forbids_syncs || non_blocking, "a copy from the host waits for the device");
    from = source.clone();
  }
  Lock lock;
  push(current(), {[from = kept(from), to = kept(to)] {
    at::AutoDispatchBelowADInplaceOrView below;
    to->copy_(*from);
    return true;
  }});
  return target;
}
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  return copy_from(source, target.resize_(source.sizes()), false);
}

c10::Scalar item(const Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  wait_here("item");
  return host_of(tensor).item();
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  const bool drops = train.value_or(true);
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  drops ? mask.bernoulli_(1 - p) : mask.fill_(true);
  return {drops ? input * mask * (p == 1 ? 0 : 1 / (1 - p)) : input.clone(), mask};
}

Tensor& set_storage_at(Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device().type() == kSim, "set_ of a storage on ", storage.device());
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}
Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const int64_t numel = storage.nbytes() / tensor.itemsize();
  return set_storage_at(tensor, storage, 0, {numel}, {1});
}
Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage_at(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& tensor) { return set_tensor(tensor, at::empty({0}, tensor.options())); }
const Tensor& resize(const Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}
void record_stream(Tensor& tensor, c10::Stream stream) { used_on(tensor.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("native_dropout", &dropout);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue>()); }

}  // namespace
}  // namespace late
