// A device that this machine does not have, whose work happens late: see streams.h.
//
// Its tensors, of type "sim", lie in the host's memory. Memory that is given back is poisoned in the order of its stream and
// handed out again at once on that stream; pinned memory is known, so that copies that do not block really are late. So a
// missing wait, a block that is reused too early, a pinned buffer that is read before its event, and a read of memory that has
// been given back come out as NaN on every run, and not once in a thousand.

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unordered_set>

namespace late {

// ---- memory ----------------------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  size_t size;
  int stream;
  std::set<int> used_on;            // other streams, by `record_stream`
  std::vector<EventPtr> still_used;  // at the end of its life
};
std::map<std::pair<int, size_t>, std::vector<Block*>> pool;
std::vector<Block*> in_use_elsewhere;
struct Bytes {
  int64_t allocated, peak, reserved;
} bytes[kDevices];

void poison(Block* block) {
  push(block->stream, {[block] {
    memset(block->memory, 0xFF, block->size);
    return true;
  }});
  pool[{block->stream, block->size}].push_back(block);
}

void give_back(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  Lock lock;
  bytes[streams[block->stream].device].allocated -= block->size;
  for (int s : block->used_on) block->still_used.push_back(record(s));
  block->used_on.clear();
  block->still_used.empty() ? poison(block) : in_use_elsewhere.push_back(block);
}

void take_back_what_is_over() {
  std::vector<Block*> left;
  for (auto* block : in_use_elsewhere) {
    bool is_over = true;
    for (const auto& event : block->still_used) is_over &= event->done;
    if (!is_over) {
      left.push_back(block);
      continue;
    }
    block->still_used.clear();
    poison(block);
  }
  in_use_elsewhere.swap(left);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kSim, current_device);
    if (!num_bytes) return {nullptr, nullptr, &give_back, device};
    Lock lock;
    take_back_what_is_over();
    const size_t size = (num_bytes + 511) / 512 * 512;
    auto& count = bytes[current_device];
    auto& free = pool[{current(), size}];
    Block* block;
    if (free.empty()) {
      block = new Block{aligned_alloc(64, size), size, current(), {}, {}};
      memset(block->memory, 0xFF, size);
      count.reserved += size;
    } else {
      block = free.back();
      free.pop_back();
    }
    count.allocated += size;
    count.peak = std::max(count.peak, count.allocated);
    return {block->memory, block, &give_back, device};
  }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    Lock lock;
    push(current(), {[=] {
      memcpy(target, source, num_bytes);
      return true;
    }});
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

void used_on(const c10::DataPtr& memory, const c10::Stream& stream) {
  Lock lock;
  auto* block = static_cast<Block*>(memory.get_context());
  if (block && block->stream != stream.id()) block->used_on.insert(stream.id());
}

std::map<const char*, size_t> pinned;
void unpin(void* memory) {  // kept, because copies may be under way
  Lock lock;
  pinned.erase(static_cast<char*>(memory));
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    Lock lock;
    char* memory = static_cast<char*>(aligned_alloc(64, (num_bytes + 63) / 64 * 64 + 64));
    pinned[memory] = num_bytes;
    return {memory, memory, &unpin, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override { memcpy(target, source, num_bytes); }
};
PinnedAllocator pinned_allocator;
bool is_pinned(const void* data) {
  Lock lock;
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + std::max<size_t>(after->second, 1);
}

// ---- what torch asks of a device ---------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int s) { return c10::Stream(c10::Stream::UNSAFE, {kSim, streams[s].device}, s); }
  static c10::DeviceIndex of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  c10::DeviceType type() const override { return kSim; }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = getDevice();
    current_device = of(device);
    return old;
  }
  void setDevice(c10::Device device) const override { current_device = of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return stream(current_streams[of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock;
    streams.push_back({of(device)});
    return stream(streams.size() - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto& place = current_streams[next.device_index()];
    const auto old = stream(place);
    place = next.id();
    return old;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new EventPtr;
    *static_cast<EventPtr*>(*event) = late::record(on.id());
  }
  void block(void* event, const c10::Stream& on) const override {
    Lock lock;
    if (event) push(on.id(), {nullptr, *static_cast<EventPtr*>(event), nullptr});
  }
  bool queryEvent(void* event) const override { return !event || (*static_cast<EventPtr*>(event))->done; }
  bool queryStream(const c10::Stream& on) const override {
    Lock lock;
    return streams[on.id()].tasks.empty();
  }
  void synchronizeStream(const c10::Stream& on) const override {
    Lock lock;
    counts["host waits: synchronize"]++;
    synchronize(on.id());
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    counts["host waits: event"]++;
    if (event) force(*static_cast<EventPtr*>(event));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    Lock lock;
    for (size_t s = 0; s < streams.size(); s++) {
      if (streams[s].device == index) synchronize(s);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& on) const override { used_on(memory, on); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const at::Generator& generator() {
  static at::Generator made = at::detail::createCPUGenerator(0);
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current_device, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto fresh = allocator.allocate(num_bytes);
    const size_t kept = std::min(num_bytes, impl->nbytes());
    if (kept) allocator.copy_data(fresh.mutable_get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));  // the old memory is given back here, behind the copy
    impl->set_nbytes(num_bytes);
  }
};
Hooks hooks;

// ---- operations --------------------------------------------------------------------------------------------------------

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

using Convert = std::function<Tensor(const Tensor&)>;
using Values = std::vector<c10::IValue>;

void convert(c10::IValue& value, const Convert& each, c10::Device device) {
  if (value.isTensor()) {
    value = each(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = each(tensor);
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> item : value.toOptionalTensorList()) {
      list.push_back(item && item->defined() ? std::optional<Tensor>(each(*item)) : item);
    }
    value = list;
  } else if (value.isDevice() && value.toDevice().type() == kSim) {
    value = device;
  }
}
Values converted(Values values, const Convert& each, c10::Device device) {
  for (auto& value : values) convert(value, each, device);
  return values;
}

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

int generator_at(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].name() == "generator") return i;
  }
  return -1;
}

// Whether the host needs what an operation finds, or the order of random numbers, before it can go on.
bool waits(const c10::OperatorHandle& op, const Values& given) {
  const auto& schema = op.schema();
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  for (auto tag : op.getTags()) {
    if (tag == at::Tag::data_dependent_output) return true;
    if (tag == at::Tag::nondeterministic_seeded && generator_at(op) < 0) return true;
    if (tag != at::Tag::dynamic_output_shape) continue;
    if (schema.name() != "aten::index") return true;
    for (const std::optional<Tensor> index : given[1].toOptionalTensorList()) {
      if (!index || !index->defined()) continue;
      if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) return true;
    }
  }
  return false;
}

// As on CUDA, what is drawn is settled when the operation is queued, and not when it runs.
void draw_seed(const c10::OperatorHandle& op, Values& host) {
  const int place = generator_at(op);
  if (place < 0) return;
  auto from = host[place].isNone() ? generator() : host[place].toGenerator();
  std::lock_guard<std::mutex> guard(from.mutex());
  host[place] = at::detail::createCPUGenerator(from.get<at::CPUGeneratorImpl>()->random64());
}

// Which argument each result is, if it is one that was written to; else -1.
std::vector<int> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> found(schema.returns().size(), -1);
  for (size_t r = 0; r < found.size(); r++) {
    const auto* written = schema.returns()[r].alias_info();
    for (size_t i = 0; written && i < schema.arguments().size(); i++) {
      const auto* info = schema.arguments()[i].alias_info();
      if (!info || !(*info == *written)) continue;
      found[r] = i;
      break;
    }
  }
  return found;
}

Tensor new_like(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::Device device(kSim, current_device);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}
Tensor meta_of(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto options = tensor.options().device(at::kMeta).requires_grad(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}
Tensor by_value(const Tensor& tensor) {  // numbers of the host are part of a launch
  return is_sim(tensor) ? host_of(tensor) : tensor.defined() ? tensor.clone() : tensor;
}

// Make what an operation returns, of the sizes that torch's meta kernels tell; false where they cannot.
bool make_results(const c10::OperatorHandle& op, const Values& given, const std::vector<int>& alias, Values& results) {
  Values meta = converted(given, meta_of, at::kMeta);
  try {
    const int place = generator_at(op);
    if (place >= 0) meta[place] = c10::IValue();
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
  } catch (const std::exception&) {
    return false;
  }
  for (size_t r = 0; r < alias.size(); r++) {
    if (alias[r] < 0) {
      results[r] = meta[r];
      convert(results[r], new_like, at::kCPU);
    } else if (given[alias[r]].isTensor() && given[alias[r]].toTensor().sizes() != meta[r].toTensor().sizes()) {
      given[alias[r]].toTensor().resize_(meta[r].toTensor().sizes());
    }
  }
  return true;
}

void run_now(const c10::OperatorHandle& op, const Values& given, const std::vector<int>& alias, Values& results) {
  const auto name = op.schema().name();
  wait_here(name);
  Values host = converted(given, host_of, at::kCPU);
  draw_seed(op, host);
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

void run_later(const c10::OperatorHandle& op, const Values& given, const Values& results) {
  Values host = converted(given, by_value, at::kCPU), targets = converted(results, host_of, at::kCPU);
  draw_seed(op, host);
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
  const auto alias = written_arguments(schema);
  bool makes = false;
  for (int argument : alias) makes |= argument < 0 || schema.arguments()[argument].kwarg_only();  // `out=` may grow
  Values results(alias.size());
  if (waits(op, given) || (makes && !make_results(op, given, alias, results))) {
    run_now(op, given, alias, results);
  } else {
    run_later(op, given, results);
  }
  stack->resize(stack->size() - count);
  for (size_t r = 0; r < alias.size(); r++) stack->push_back(alias[r] < 0 ? results[r] : given[alias[r]]);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
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
  push(current(), {[from, to]() mutable {
    to.copy_(from);
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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace late;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  keep_going();
  m.attr("num_devices") = kDevices;
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](c10::DeviceIndex index) { current_device = index; });
  m.def("synchronize", [] {
    py::gil_scoped_release released;
    Lock lock;
    for (size_t s = 0; s < streams.size(); s++) synchronize(s);
  });
  m.def("run_early", [](bool early) { runs_early = early; });
  m.def("forbid_syncs", [](bool forbids) { forbids_syncs = forbids; });
  m.def("counts", [] {
    Lock lock;
    return counts;
  });
  m.def("generator", [] { return generator(); });
  m.def("memory_allocated", [](int device) { return bytes[device].allocated; });
  m.def("max_memory_allocated", [](int device) { return bytes[device].peak; });
  m.def("memory_reserved", [](int device) { return bytes[device].reserved; });
  m.def("reset_peak_memory_stats", [](int device) { bytes[device].peak = bytes[device].allocated; });
  define_exchanges(m);
}
