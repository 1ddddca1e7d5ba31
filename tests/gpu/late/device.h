// What the parts of the device share.
#pragma once

#include <ATen/ATen.h>

#include "streams.h"

namespace late {

using at::Tensor;

inline bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory, as a tensor of the host that keeps nothing alive: what a kernel is given.
Tensor host_of(const Tensor& tensor);

// Memory of the device, and what is known of the host's.
at::Allocator& memory();
bool is_pinned(const void* data);
void used_on(const c10::DataPtr& memory, const c10::Stream& stream);
const at::Generator& generator();

void define_exchanges(py::module& m);

}  // namespace late
