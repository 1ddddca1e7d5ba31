// What the parts of the device share.
#pragma once

#include <ATen/ATen.h>

#include "streams.h"

namespace late {

using at::Tensor;

inline bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory, as a tensor of the host that keeps nothing alive: what a kernel is given.
Tensor host_of(const Tensor& tensor);

void define_exchanges(py::module& m);

}  // namespace late
