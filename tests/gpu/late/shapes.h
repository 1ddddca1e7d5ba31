// What an operation takes and gives, told before it runs; torch's meta kernels are asked once for each combination of shapes.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>

#include "device.h"

namespace late {
namespace {

using Convert = std::function<Tensor(const Tensor&)>;
using Values = std::vector<c10::IValue>;
using Tensors = std::vector<Tensor>;

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

Tensor new_like(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::Device device(kSim, current_device);
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}
// A number beside tensors is a tensor that has no say in the dtype of the result.
Tensor as_number(const Tensor& tensor, Tensor other) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) other.unsafeGetTensorImpl()->set_wrapped_number(true);
  return other;
}
Tensor meta_of(const Tensor& tensor) {
  // A number stays one of the host's: meta kernels that are Python take it for a number only there.
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  const auto options = tensor.options().device(at::kMeta).requires_grad(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
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

// What does not change from call to call of an operation.
struct Facts {
  std::vector<int> alias;  // see `written_arguments`
  int generator = -1;      // which argument it is
  bool makes = false;      // results, or larger ones in `out=`
  bool waits = false;      // the host needs what it finds, or the order of random numbers, before it can go on
  bool waits_for_masks = false;

  explicit Facts(const c10::OperatorHandle& op) {
    const auto& schema = op.schema();
    const auto& arguments = schema.arguments();
    alias = written_arguments(schema);
    for (size_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].name() == "generator") generator = i;
    }
    for (int argument : alias) makes |= argument < 0 || arguments[argument].kwarg_only();
    for (const auto& result : schema.returns()) {
      const auto kind = result.type()->kind();
      waits |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    }
    for (auto tag : op.getTags()) {
      waits |= tag == at::Tag::data_dependent_output;
      waits |= tag == at::Tag::nondeterministic_seeded && generator < 0;
      if (tag != at::Tag::dynamic_output_shape) continue;
      (schema.name() == "aten::index" ? waits_for_masks : waits) = true;
    }
  }
};
const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex guard;
  static std::unordered_map<const void*, std::unique_ptr<Facts>> known;
  std::lock_guard<std::mutex> locked(guard);
  auto& found = known[&op.schema()];
  if (!found) found = std::make_unique<Facts>(op);
  return *found;
}

// The sizes, strides and dtype of a result, or of each of a list.
struct Shape {
  bool is_list = false;
  std::vector<std::optional<at::TensorOptions>> options;  // none: no tensor
  std::vector<std::vector<int64_t>> sizes, strides;

  explicit Shape(const c10::IValue& value) : is_list(value.isTensorList()) {
    for (const auto& each : is_list ? value.toTensorVector() : Tensors{value.toTensor()}) {
      options.push_back(each.defined() ? std::optional(at::TensorOptions().dtype(each.dtype())) : std::nullopt);
      sizes.push_back(each.defined() ? each.sizes().vec() : std::vector<int64_t>());
      strides.push_back(each.defined() ? each.strides().vec() : std::vector<int64_t>());
    }
  }
  c10::IValue make() const {
    Tensors made;
    for (size_t i = 0; i < options.size(); i++) {
      const c10::Device device(kSim, current_device);
      made.push_back(options[i] ? at::empty_strided(sizes[i], strides[i], options[i]->device(device)) : Tensor());
    }
    return is_list ? c10::IValue(made) : c10::IValue(made[0]);
  }
};

// What the shapes of results hang on: the operation, shapes and dtypes, and what is given by value. False: something else, too.
bool add_to_key(std::string& key, const c10::IValue& value) {
  auto add = [&key](const auto& number) { key.append(reinterpret_cast<const char*>(&number), sizeof number); };
  auto add_all = [&](const auto& numbers) {
    add(numbers.size());
    for (const auto& each : numbers) add(each);
  };
  auto add_tensor = [&](const Tensor& tensor) {
    add(tensor.defined());
    if (!tensor.defined()) return;
    add(tensor.scalar_type()), add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_all(tensor.sizes()), add_all(tensor.strides());
  };
  key += char(value.isNone() ? 'n' : value.isTensor() ? 't' : value.isInt() ? 'i' : value.isDouble() ? 'd' : 'o');
  if (value.isNone() || value.isGenerator()) return true;
  if (value.isTensor()) return add_tensor(value.toTensor()), true;
  if (value.isInt()) return add(value.toInt()), true;
  if (value.isDouble()) return add(value.toDouble()), true;
  if (value.isBool()) return key += value.toBool() ? "T" : "F", true;
  if (value.isIntList()) return add_all(value.toIntVector()), true;
  if (value.isString()) return key += value.toStringRef(), true;
  if (value.isDevice()) return key += value.toDevice().str(), true;
  if (value.isTensorList()) {
    for (const auto& each : value.toTensorVector()) add_tensor(each);
    return true;
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> each : value.toOptionalTensorList()) add_tensor(each ? *each : Tensor());
    return true;
  }
  return false;
}

// The shapes that torch's meta kernels tell, many of which are Python; none where they cannot.
using Shapes = std::vector<Shape>;
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const Values& given, int place) {
  static std::mutex guard;
  static std::unordered_map<std::string, std::shared_ptr<const Shapes>> known;
  std::string key = std::to_string(reinterpret_cast<uintptr_t>(&op.schema())) + c10::toString(at::get_default_dtype_as_scalartype());
  bool is_known = true;
  for (const auto& value : given) is_known = is_known && add_to_key(key, value);
  if (is_known) {
    std::lock_guard<std::mutex> locked(guard);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  Values meta = converted(given, meta_of, at::kMeta);
  auto shapes = std::make_shared<Shapes>();
  try {
    if (place >= 0) meta[place] = c10::IValue();
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    for (const auto& value : meta) shapes->emplace_back(value);
  } catch (const std::exception&) {
    return nullptr;
  }
  if (is_known) {
    std::lock_guard<std::mutex> locked(guard);
    known[key] = shapes;
  }
  return shapes;
}

}  // namespace
}  // namespace late
