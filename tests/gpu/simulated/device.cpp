// A device that this machine does not have: tensors of type "sim", whose memory is the host's, and whose operations are the
// CPU's. It shows what the host hides: tensors of both devices in one operation, reads of memory that nothing has written (it
// starts as NaN), and, where `forbid_syncs` asks for it, each place where a program would wait for the device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <unordered_set>

using at::Tensor;

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kSim, 0);
bool forbids_syncs = false;

// ---- memory, streams and what else torch asks of a device ----------------------------------------------------------

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* memory = num_bytes ? aligned_alloc(64, (num_bytes + 63) / 64 * 64) : nullptr;
    if (memory) memset(memory, 0xFF, num_bytes);
    return {memory, memory, &free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override { memcpy(target, source, num_bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &allocator; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator(0);
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), num_bytes);
  }
};
Hooks hooks;

// ---- operations ----------------------------------------------------------------------------------------------------

bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory as a tensor of the host.
Tensor host_of(const Tensor& tensor) {
  if (!tensor.numel() || !tensor.storage().data()) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  c10::DataPtr memory(const_cast<void*>(tensor.storage().data()), c10::Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(memory), nullptr, false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return host;
}

Tensor to_sim(const Tensor& host) {
  auto tensor = at::empty_strided(host.sizes(), host.strides(), host.options().device(kDevice));
  if (host.numel()) host_of(tensor).copy_(host);
  return tensor;
}

// Indices may be on the host, and fused optimizers' counts of steps are checked by torch itself.
const std::unordered_set<std::string> kMayMix = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
// Their results' sizes, or themselves, are needed on the host.
const std::unordered_set<std::string> kSyncs = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::bincount"};

// Any operation: that of the CPU, on the same memory.
void by_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK(!forbids_syncs || !kSyncs.count(schema.name()), schema.name(), " waits for the device");
  const auto count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  std::vector<Tensor> on_sim;
  bool makes_sim = false, has_host = false;
  auto convert = [&](const Tensor& tensor) {
    if (is_sim(tensor)) return on_sim.push_back(tensor), host_of(tensor);
    has_host |= tensor.defined() && tensor.dim() > 0;
    return tensor;
  };
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& each : list) each = convert(each);
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor> each : value.toOptionalTensorList()) {
        list.push_back(each && each->defined() ? std::optional<Tensor>(convert(*each)) : each);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      makes_sim = true;
      value = c10::Device(at::kCPU);
    }
  }
  TORCH_CHECK(on_sim.empty() || !has_host || kMayMix.count(schema.name()), schema.name(), " mixes tensors of two devices");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  auto back = [&](const Tensor& result) {
    if (!result.defined() || result.device().type() != at::kCPU || (on_sim.empty() && !makes_sim)) return result;
    for (const auto& each : on_sim) {
      if (result.numel() && each.storage().data() && result.storage().data() == each.storage().data()) {
        return each.as_strided(result.sizes(), result.strides(), result.storage_offset());
      }
    }
    return to_sim(result);
  };
  const auto results = stack->size() - schema.returns().size();
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto& value = (*stack)[results + r];
    const auto* written = schema.returns()[r].alias_info();
    if (written && written->isWrite()) {
      for (size_t i = 0; i < count; i++) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (!alias || !(*alias == *written)) continue;
        if (given[i].isTensor() && is_sim(given[i].toTensor()) && given[i].toTensor().sizes() != value.toTensor().sizes()) {
          given[i].toTensor().resize_(value.toTensor().sizes());
          host_of(given[i].toTensor()).copy_(value.toTensor());
        }
        value = given[i];
        break;
      }
    } else if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& each : list) each = back(each);
      value = list;
    }
  }
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool crosses = is_sim(source) != is_sim(target) && source.numel();
  TORCH_CHECK(!forbids_syncs || !crosses || non_blocking, "a copy between devices waits for the device");
  (is_sim(target) ? host_of(target) : target).copy_(is_sim(source) ? host_of(source) : source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  return copy_from(source, target.resize_(source.sizes()), false);
}

c10::Scalar item(const Tensor& tensor) {
  TORCH_CHECK(!forbids_syncs, "item() waits for the device");
  return host_of(tensor).item();
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
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_host>()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("forbid_syncs", [](bool forbids) { forbids_syncs = forbids; });
  m.def("host_of", [](const Tensor& tensor) { return host_of(tensor); });
}
