// A device that this machine does not have, whose work happens late: see streams.h.
//
// Its tensors, of type "sim", lie in the host's memory. Memory that is given back is poisoned in the order of its stream and
// handed out again at once on that stream; pinned memory is known, so that copies that do not block really are late. So a
// missing wait, a block that is reused too early, a pinned buffer that is read before its event, and a read of memory that has
// been given back come out as NaN on every run, and not once in a thousand.

#include "device.h"
#include "segments.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace late {

// ---- memory ----------------------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  size_t size;
  int stream;
  std::set<int> used_on;            // other streams, by `record_stream`
  std::vector<EventPtr> still_used;  // at the end of its life
  Segments::Piece* piece;            // where it would lie on a device
};
std::map<std::pair<int, size_t>, std::vector<Block*>> pool;
std::vector<Block*> in_use_elsewhere;
struct Bytes {
  int64_t allocated, peak;
} bytes[kDevices];
Segments segments[kDevices];

void poison(Block* block) {
  push(block->stream, {[block] {
    memset(block->memory, 0xFF, block->size);
    return true;
  }});
  pool[{block->stream, block->size}].push_back(block);
  segments[streams[block->stream].device].give_back(block->stream, block->size, block->piece);
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
  std::vector<Block*> blocks;
  blocks.swap(in_use_elsewhere);  // to poison one runs tasks, and these may give others back
  for (auto* block : blocks) {
    bool is_over = true;
    for (const auto& event : block->still_used) is_over &= event->done;
    if (!is_over) {
      in_use_elsewhere.push_back(block);
      continue;
    }
    block->still_used.clear();
    poison(block);
  }
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
      block = new Block{aligned_alloc(64, size), size, current(), {}, {}, nullptr};
      memset(block->memory, 0xFF, size);
    } else {
      block = free.back();
      free.pop_back();
    }
    block->piece = segments[current_device].take(block->stream, size);
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
at::Allocator& memory() { return allocator; }

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
    return stream(new_stream(of(device), false));
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
    for (int s = 0; s < num_streams; s++) {
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
    for (int s = 0; s < num_streams; s++) synchronize(s);
  });
  m.def("run_early", [](bool early) { runs_early = early; });
  m.def("forbid_syncs", [](bool forbids) { forbids_syncs = forbids; });
  m.def("forgive_failures", [](bool forgives) { forgives_failures = forgives; });
  m.def("counts", [] {
    Lock lock;
    return counts;
  });
  m.def("generator", [] { return generator(); });
  m.def("memory_allocated", [](int device) { return bytes[device].allocated; });
  m.def("max_memory_allocated", [](int device) { return bytes[device].peak; });
  m.def("memory_reserved", [](int device) { return segments[device].reserved(); });
  m.def("max_memory_reserved", [](int device) { return segments[device].most(); });
  m.def("reset_peak_memory_stats", [](int device) {
    bytes[device].peak = bytes[device].allocated;
    segments[device].forget_most();
  });
  m.def("num_communicators", [](int device) {
    return std::count_if(streams.begin(), streams.begin() + num_streams,
                         [&](const Stream& s) { return s.device == device && s.is_side && !s.is_unused; });
  });
  define_exchanges(m);
}
