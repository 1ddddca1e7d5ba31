// Streams whose work happens as late, or in as unfortunate an order, as CUDA permits.
//
// An operation queues a closure over raw addresses, as a kernel launch does. What is queued runs when the host waits for it, and
// then only what it depends on. Two orders lie at the two ends of what CUDA permits: "late" (streams of exchanges and copies run
// when they are waited for) and "early" (they run as soon as what they wait for is done, the computation as late as it can).
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <unistd.h>

namespace late {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

struct Event {
  std::atomic<bool> done{false};
  int stream = 0;
};
using EventPtr = std::shared_ptr<Event>;

struct Task {
  std::function<bool()> run;  // false: it waits for other ranks, and is asked again later
  EventPtr wait, mark;
};

struct Stream {
  c10::DeviceIndex device = 0;
  bool is_side = false;  // of exchanges: all others are computed on
  bool is_unused = false;
  std::deque<Task> tasks;
};

// The first are the default streams of the devices. An array, since a stream is looked at while another is made.
inline std::array<Stream, 4096> streams;
inline std::atomic<int> num_streams{kDevices};
inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local int current_streams[kDevices] = {0, 1};
inline int current() { return current_streams[current_device]; }

inline bool runs_early = false;
inline bool forbids_syncs = false;
inline std::map<std::string, int64_t> counts;
inline std::recursive_mutex mutex;
inline std::atomic<int64_t> activity{0};  // grows with whatever is queued or run

inline int lock_depth = 0;
// Tensors of Python's that a task has held. Letting go of them takes Python's lock, whose owner may wait for ours.
inline std::vector<at::Tensor> let_go;

// Whoever waits for it lets go of Python, and nobody who has it waits for Python.
inline void take_mutex() {
  const bool has_python = Py_IsInitialized() && PyGILState_Check();
  while (!mutex.try_lock()) {
    std::optional<py::gil_scoped_release> released;
    if (has_python) released.emplace();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  lock_depth++;
}
inline void leave_mutex() {
  std::vector<at::Tensor> gone;
  if (--lock_depth == 0) gone.swap(let_go);
  mutex.unlock();
}
struct Lock {
  Lock() { take_mutex(); }
  ~Lock() { leave_mutex(); }
};

inline int new_stream(c10::DeviceIndex device, bool is_side) {
  Lock lock;
  for (int s = kDevices; s < num_streams; s++) {  // of a group that is gone
    if (streams[s].is_unused && streams[s].is_side == is_side && streams[s].device == device) {
      streams[s].is_unused = false;
      return s;
    }
  }
  const int s = num_streams;
  TORCH_CHECK(s < int(streams.size()), "too many streams");
  streams[s].device = device;
  streams[s].is_side = is_side;
  num_streams++;
  return s;
}

inline bool is_running = false;  // a task may free tensors, which queues tasks
inline bool forgives_failures = false;

// As an assertion on a device, after which nothing can be done with it; but where a mistake was put in, it is seen by that.
inline void fail(const std::string& message) {
  counts["failures"]++;
  if (forgives_failures) return;
  std::cerr << "an operation failed on the device: " << message << std::endl;
  _exit(70);
}

// Run the next task of a stream, if it can.
inline bool step(int s) {
  auto& tasks = streams[s].tasks;
  if (tasks.empty() || is_running) return false;
  Task& task = tasks.front();
  if (task.wait && !task.wait->done) return false;
  if (task.run) {
    is_running = true;
    bool is_over = false;
    try {
      is_over = task.run();
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
      is_over = true;
    } catch (const std::exception& error) {
      fail(error.what());
      is_over = true;
    }
    is_running = false;
    if (!is_over) return false;
  }
  if (task.mark) task.mark->done = true;
  const Task over = std::move(task);  // it is let go of once it is off the stream: that may free tensors, which queues tasks
  tasks.pop_front();
  activity++;
  return true;
}

inline bool step_all(bool only_side) {
  bool any = false;
  for (int s = 0; s < num_streams; s++) {
    if (streams[s].is_side || !only_side) any |= step(s);
  }
  return any;
}

inline void run_side_streams_early() {
  while (runs_early && step_all(true)) {
  }
}

inline void push(int s, Task task) {
  streams[s].tasks.push_back(std::move(task));
  counts[streams[s].is_side ? "tasks on side streams" : "tasks of the computation"]++;
  activity++;
  run_side_streams_early();
}

inline EventPtr record(int s) {
  auto event = std::make_shared<Event>();
  event->stream = s;
  push(s, {nullptr, nullptr, event});
  return event;
}

// One step towards an event, if there is one that no other rank has to take.
inline bool approach(const EventPtr& event) {
  const Task& next = streams[event->stream].tasks.front();
  return next.wait && !next.wait->done ? approach(next.wait) : step(event->stream);
}

// The like towards all exchanges, for which other ranks may wait. Not of what nobody waits for: how long this rank stands here
// would decide whether a copy comes before its memory is used anew.
inline bool approach_exchanges() {
  bool any = false;
  for (int s = 0; s < num_streams; s++) {
    if (!streams[s].is_side || streams[s].tasks.empty()) continue;
    const EventPtr wait = streams[s].tasks.front().wait;
    any |= wait && !wait->done ? approach(wait) : step(s);
  }
  return any;
}

// Run what comes before an event on its stream, and what that waits for; nothing else, unless other ranks are waited for.
inline void force(EventPtr event) {  // a copy: the task that it is part of may be over meanwhile
  while (!event->done) {
    if (approach(event)) {
      run_side_streams_early();
    } else if (!approach_exchanges()) {
      leave_mutex();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      take_mutex();
    }
  }
}

inline void synchronize(int s) { force(record(s)); }

// The host waits for the current stream.
inline void wait_here(const std::string& why) {
  TORCH_CHECK(!forbids_syncs, why, " waits for the device");
  Lock lock;
  counts["host waits: " + why]++;
  synchronize(current());
}

// A device goes on while the host stands: it may wait for a peer, who waits for an exchange that is queued here.
inline void keep_going() {
  for (int device = 0; device < kDevices; device++) streams[device].device = device;
  std::thread([] {
    int64_t seen = -1;
    for (int idle = 0;; std::this_thread::sleep_for(std::chrono::milliseconds(25))) {
      idle = activity == seen ? idle + 1 : 0;
      seen = activity;
      if (idle < 10) continue;
      Lock lock;
      while (step_all(false)) seen = activity;  // and goes on at once, as soon as a peer has come
    }
  }).detach();
}

}  // namespace late
