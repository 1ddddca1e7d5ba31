// Exchanges of tensors on the device, as NCCL's: in order on a stream of their group, behind the computation that was queued
// before them, in place. They take addresses when they are launched and bytes when their stream comes to them; what they write
// is NaN until they are over. What NCCL refuses is refused in its words. The bytes travel over gloo.

#include "device.h"

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdlib>
#include <numeric>

#include <pybind11/chrono.h>

namespace late {
namespace {

using c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

// One collective of a launch: begun when the stream comes to it, and over when all ranks have come.
struct Part {
  std::function<WorkPtr()> start;
  std::function<void()> finish;
};

void spoil(const Tensor& host) {
  host.is_floating_point() || host.is_complex() ? host.fill_(std::numeric_limits<double>::quiet_NaN()) : host.fill_(113);
}
Tensor bytes_of(const Tensor& host) { return host.view(-1).view(at::kByte); }

// Its `wait` makes the current stream wait, and not the host; until then it keeps the tensors, as NCCL's does.
struct LateWork final : c10d::Work {
  EventPtr end;
  Tensors kept;
  LateWork(EventPtr event, Tensors tensors) : end(std::move(event)), kept(std::move(tensors)) {}
  bool isCompleted() override { return end->done; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto gone = std::move(kept);  // after the lock
    Lock lock;
    if (timeout != kNoTimeout) {
      TORCH_CHECK(!forbids_syncs, "an exchange that is given a time blocks the process");
      counts["host waits: an exchange that is given a time"]++;
      force(end);
    }
    push(current(), {nullptr, end, nullptr});
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  c10::intrusive_ptr<c10::ivalue::Future> future;  // whoever takes its value waits on its own stream
};

constexpr auto kSplit = std::chrono::seconds(20);

struct Exchanges final : c10d::Backend {
  Exchanges(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
            c10::intrusive_ptr<Exchanges> parent)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)), parent_(std::move(parent)) {}

  ~Exchanges() override {  // by now all that it has launched is over
    if (stream_ >= 0) streams[stream_].is_unused = true;
  }

  const std::string getBackendName() const override { return "nccl"; }
  void shutdown() override {  // waits for what has been launched
    Lock lock;
    if (stream_ >= 0) synchronize(stream_);
  }
  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(c10::Device device) override { connect(device); }
  // A communicator that is split off this one: all of its ranks take part, also those that the new one has not.
  void split() {
    const auto name = "split " + std::to_string(num_splits_++) + " on rank ";
    store_->set(name + std::to_string(getRank()), std::vector<uint8_t>{1});
    for (int peer = 0; peer < getSize(); peer++) {
      try {
        store_->wait({name + std::to_string(peer)}, kSplit);
      } catch (const std::exception&) {
        C10_THROW_ERROR(DistBackendError, "ncclCommSplit hangs: rank " + std::to_string(peer) + " of the parent does not call it");
      }
    }
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_collecting_ = true; }
  WorkPtr endCoalescing() override {
    is_collecting_ = false;
    auto parts = std::move(collected_);
    return launch(std::move(kept_), std::move(parts), true);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(tensors, {sum(tensors[0], tensors[0], options.reduceOp)}, options.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Part> parts;
    for (const auto& each : tensors) {
      if (each.scalar_type() != tensors[0].scalar_type()) C10_THROW_ERROR(TypeError, "Tensors must have identical type");
      parts.push_back(sum(each, each, options.reduceOp));
    }
    return launch(tensors, std::move(parts), options.asyncOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(tensors, {sum(tensors[0], tensors[0], options.reduceOp)}, options.asyncOp);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors[0]);
    const auto host = host_of(tensors[0]);
    const int root = options.rootRank;
    auto values = std::make_shared<Tensors>();
    Part part{[=] {
      values->push_back(bytes_of(host).clone());
      if (getRank() != root) spoil(host);
      c10d::BroadcastOptions from;
      from.rootRank = root;
      return gloo_->broadcast(*values, from);
    }, [=] { bytes_of(host).copy_((*values)[0]); }};
    return launch(tensors, {part}, options.asyncOp);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch({output, input}, {gather_into(output, input)}, options.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < inputs.size(); i++) parts.push_back(gather_into(outputs[i], inputs[i]));
    return launch(both(outputs, inputs), std::move(parts), options.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch(both(outputs[0], inputs), {gather_to(outputs[0], inputs[0])}, options.asyncOp);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors targets = getRank() == options.rootRank ? outputs[0] : Tensors();
    return launch(both(targets, inputs), {gather_to(targets, inputs[0])}, options.asyncOp);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return launch({output, input}, {scatter_sum(output, input, options.reduceOp)}, options.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Part> parts;
    for (size_t i = 0; i < inputs.size(); i++) parts.push_back(scatter_sum(outputs[i], inputs[i], options.reduceOp));
    return launch(both(outputs, inputs), std::move(parts), options.asyncOp);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const bool is_root = getRank() == options.rootRank;
    return launch(both(outputs, is_root ? inputs[0] : Tensors()),
                  {exchange(std::vector<Tensor>(getSize()), is_root ? inputs[0] : std::vector<Tensor>(getSize()), outputs[0],
                            options.rootRank)},
                  options.asyncOp);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return launch(both(outputs, inputs), {exchange(outputs, inputs)}, options.asyncOp);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& from, std::vector<int64_t>& to,
                        const c10d::AllToAllOptions& options) override {
    auto pieces = [this](const Tensor& tensor, const std::vector<int64_t>& sizes) {
      return sizes.empty() ? at::chunk(tensor, getSize()) : at::split_with_sizes(tensor, sizes);
    };
    return launch({output, input}, {exchange(pieces(output, from), pieces(input, to))}, options.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Tensors one = {at::ones({1}, at::device(c10::Device(kSim, current_device)))};
    auto work = allreduce(one, {});
    work->wait(std::chrono::minutes(10));
    return work;
  }

 private:
  static Tensors both(Tensors tensors, const Tensors& others) {
    tensors.insert(tensors.end(), others.begin(), others.end());
    return tensors;
  }
  static void check(const Tensor& tensor) {
    if (!is_sim(tensor)) C10_THROW_ERROR(ValueError, "Tensors must be CUDA and dense");
    if (!tensor.is_contiguous()) C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
  }

  // What adds up `from` over all ranks, and keeps in `to` the part of the sum that is its own.
  Part sum(const Tensor& from, const Tensor& to, const ReduceOp& op, int64_t first = 0) {
    check(from), check(to);
    if (from.scalar_type() != to.scalar_type()) C10_THROW_ERROR(TypeError, "output must have the same type as input");
    const auto source = host_of(from), target = host_of(to);
    const bool averages = op == ReduceOp::AVG;
    auto values = std::make_shared<Tensors>();
    return {[=] {
      values->push_back(source.clone());
      spoil(target);
      c10d::AllreduceOptions options;
      options.reduceOp = averages ? ReduceOp(ReduceOp::SUM) : op;
      return gloo_->allreduce(*values, options);
    }, [=] {
      auto own = (*values)[0].view(-1).narrow(0, first, target.numel());
      target.view(-1).copy_(averages ? own / getSize() : own);
    }};
  }
  Part scatter_sum(const Tensor& output, const Tensor& input, const ReduceOp& op) {
    if (input.numel() != output.numel() * getSize()) {
      C10_THROW_ERROR(ValueError, "input tensor must be the same size as output size times world size");
    }
    return sum(input, output, op, getRank() * output.numel());
  }
  Part gather_into(const Tensor& output, const Tensor& input) {
    check(output), check(input);
    if (input.numel() * getSize() != output.numel()) {
      C10_THROW_ERROR(ValueError, "output tensor size must be equal to world_size times input tensor size");
    }
    return gather_to(at::chunk(output.view(-1), getSize()), input);
  }
  Part gather_to(const Tensors& outputs, const Tensor& input) {
    check(input);
    const auto source = host_of(input);
    Tensors targets;
    for (const auto& each : outputs) {
      check(each);
      if (each.scalar_type() != input.scalar_type()) {
        C10_THROW_ERROR(TypeError, "output tensor must have the same type as input tensor");
      }
      targets.push_back(host_of(each));
    }
    auto own = std::make_shared<Tensors>();
    auto arriving = std::make_shared<std::vector<Tensors>>(1);
    return {[=] {
      own->push_back(bytes_of(source).clone());
      for (int peer = 0; peer < getSize(); peer++) (*arriving)[0].push_back(at::empty_like((*own)[0]));
      for (int peer = 0; peer < int(targets.size()); peer++) {
        if (peer != getRank()) spoil(targets[peer]);
      }
      return gloo_->allgather(*arriving, *own);
    }, [=] {
      for (size_t peer = 0; peer < targets.size(); peer++) {
        const bool is_own = targets[peer].data_ptr() == source.data_ptr();  // in place: NCCL leaves it
        if (!is_own) bytes_of(targets[peer]).copy_((*arriving)[0][peer]);
      }
    }};
  }

  // What sends a tensor to each rank and gets one from each; with a root, only what comes from it is kept, in `kept`.
  Part exchange(const Tensors& outputs, const Tensors& inputs, const Tensor& kept = {}, int root = -1) {
    Tensors sources, targets;
    for (const auto& each : inputs) sources.push_back(each.defined() ? host_of(each) : each);
    for (const auto& each : outputs) targets.push_back(each.defined() ? host_of(each) : each);
    if (root >= 0) targets[root] = host_of(kept);
    auto sent = std::make_shared<Tensor>(), received = std::make_shared<Tensor>();
    auto sizes = [](const Tensors& tensors) {
      std::vector<int64_t> found;
      for (const auto& each : tensors) found.push_back(each.defined() ? each.nbytes() : 0);
      return found;
    };
    return {[=] {
      Tensors parts = {at::empty({0}, at::kByte)};
      for (const auto& each : sources) {
        if (each.defined() && each.numel()) parts.push_back(bytes_of(each));
      }
      for (const auto& each : targets) {
        if (each.defined()) spoil(each);
      }
      auto from = sizes(targets), to = sizes(sources);
      *sent = at::cat(parts);
      *received = at::empty({std::accumulate(from.begin(), from.end(), int64_t(0))}, at::kByte);
      return gloo_->alltoall_base(*received, *sent, from, to);
    }, [=] {
      int64_t first = 0;
      for (const auto& each : targets) {
        if (!each.defined() || !each.numel()) continue;
        bytes_of(each).copy_(received->narrow(0, first, each.nbytes()));
        first += each.nbytes();
      }
    }};
  }

  WorkPtr launch(Tensors kept, std::vector<Part> parts, bool is_async) {
    for (const auto& each : kept) check(each);
    if (is_collecting_) {
      for (auto& part : parts) collected_.push_back(std::move(part));
      kept_ = both(std::move(kept_), kept);
      return c10::make_intrusive<LateWork>(std::make_shared<Event>(), Tensors());
    }
    const auto device = kept.empty() ? c10::Device(kSim, current_device) : kept[0].device();
    connect(device);
    c10::DeviceGuard guard(device);
    Lock lock;
    counts["launches of exchanges"]++;
    const int on = is_async ? stream_ : current();  // what the program waits for at once runs on its own stream
    if (is_async && !starts_at_once) push(on, {nullptr, record(current()), nullptr});
    if (last_ && last_->stream != on) push(on, {nullptr, last_, nullptr});  // one after the other, on all ranks alike
    // The group lives until what it has launched is over, whoever drops it.
    auto self = c10::intrusive_ptr<Exchanges>::reclaim_copy(this);
    push(on, {[self, parts = std::move(parts), works = std::vector<WorkPtr>(), is_stuck = false]() mutable {
      if (is_stuck) return false;
      try {
        if (works.empty()) {
          for (const auto& part : parts) works.push_back(part.start());
        }
        for (const auto& work : works) {
          if (!work->isCompleted()) return false;
        }
        for (const auto& work : works) work->wait();
      } catch (const std::exception&) {  // a peer is gone: on a device its kernel goes on for ever
        is_stuck = true;
        return false;
      }
      for (const auto& part : parts) part.finish();
      return true;
    }});
    auto end = last_ = record(on);
    if (waits_for_nothing) {
      end = std::make_shared<Event>();
      end->done = true;
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    {
      c10::StreamGuard behind(c10::Stream(c10::Stream::UNSAFE, device, on));
      future->markCompleted(c10::IValue(kept));
    }
    auto work = c10::make_intrusive<LateWork>(end, std::move(kept));
    work->future = future;
    return work;
  }

  // A communicator is made by all ranks at the first exchange, and each of them brings a device of its own.
  void connect(c10::Device device) {
    if (stream_ >= 0) return;
    if (parent_) parent_->split();
    const auto* host = std::getenv("NCCL_HOSTID");
    const std::string own = std::string(host ? host : "host") + " " + std::to_string(device.index());
    store_->set("device of " + std::to_string(getRank()), std::vector<uint8_t>(own.begin(), own.end()));
    for (int peer = 0; peer < getSize(); peer++) {
      const auto found = store_->get("device of " + std::to_string(peer));
      if (peer == getRank() || std::string(found.begin(), found.end()) != own) continue;
      C10_THROW_ERROR(DistBackendError, "ncclInvalidUsage: Duplicate GPU detected : rank " + std::to_string(getRank()) +
                                            " and rank " + std::to_string(peer) + " both on device " + device.str());
    }
    stream_ = new_stream(device.index(), true);
  }

 public:
  static inline bool starts_at_once = false, waits_for_nothing = false;  // mistakes, to see whether the device shows them

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Exchanges> parent_;
  int num_splits_ = 0;
  int stream_ = -1;
  EventPtr last_;
  bool is_collecting_ = false;
  std::vector<Part> collected_;
  Tensors kept_;
};

}  // namespace

void define_exchanges(py::module& m) {
  using Store = c10::intrusive_ptr<c10d::Store>;
  py::class_<Exchanges, c10::intrusive_ptr<Exchanges>, c10d::Backend>(m, "Exchanges")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, Store, int, int, c10::intrusive_ptr<Exchanges>>())
      .def("perform_nocolor_split", [](Exchanges& parent, c10::Device) { parent.split(); },
           py::call_guard<py::gil_scoped_release>());
  m.def("start_exchanges_at_once", [](bool does) { Exchanges::starts_at_once = does; });
  m.def("wait_for_no_exchange", [](bool does) { Exchanges::waits_for_nothing = does; });
}

}  // namespace late
