#include "operator_plan.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "keys.h"

namespace simulated {
namespace {

using Kind = c10::TypeKind;

bool is_optional_generator(const c10::Type& type) {
  return type.kind() == Kind::OptionalType &&
      type.castRaw<c10::OptionalType>()->getElementType()->kind() == Kind::GeneratorType;
}

// True for numbers, strings and similar types, and for lists of them. They say nothing about a device.
bool is_plain(const c10::Type& type) {
  switch (type.kind()) {
    case Kind::OptionalType:
    case Kind::ListType:
      return is_plain(*type.containedType(0));
    case Kind::IntType:
    case Kind::FloatType:
    case Kind::BoolType:
    case Kind::ComplexType:
    case Kind::NumberType:
    case Kind::StringType:
    case Kind::SymIntType:
    case Kind::SymFloatType:
    case Kind::SymBoolType:
    case Kind::LayoutType:
    case Kind::ScalarTypeType:
    case Kind::MemoryFormatType:
      return true;
    default:
      return false;
  }
}

// True for arguments that every accelerator accepts on the CPU beside device tensors.
bool may_be_on_the_cpu(const std::string& op, const std::string& argument) {
  static const std::unordered_map<std::string, std::string> arguments = {
      {"aten::index", "indices"},
      {"aten::index_put", "indices"},
      {"aten::index_put_", "indices"},
      {"aten::_index_put_impl_", "indices"},
      {"aten::_pack_padded_sequence", "lengths"},
  };
  const auto found = arguments.find(op);
  return found != arguments.end() && found->second == argument;
}

bool is_written_unsaid(const std::string& op, const std::string& argument) {
  static const std::unordered_set<std::string> averaging = {
      "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"};
  if (averaging.count(op)) {
    return argument.rfind("running_", 0) == 0;
  }
  return op.rfind("c10d::", 0) == 0 &&
      (argument == "tensor" || argument == "tensors" || argument.rfind("output", 0) == 0);
}

bool is_written_in_training(const std::string& op, const std::string& argument) {
  return (op == "aten::native_batch_norm" || op == "aten::cudnn_batch_norm") && argument.rfind("running_", 0) == 0;
}

// True if the operator needs no former element of an argument that it writes.
bool is_overwritten(const c10::OperatorHandle& op, const c10::Argument& argument) {
  static const std::unordered_set<std::string> names = {"aten::fill_", "aten::zero_", "aten::_foreach_zero_",
                                                        "aten::_foreach_copy_"};
  return argument.is_out() || names.count(op.operator_name().name) || op.hasTag(at::Tag::nondeterministic_seeded);
}

std::optional<size_t> dropout_of(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dropout_p") {
      return i;
    }
  }
  return std::nullopt;
}

bool waits_for_values(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  // aten::index has this tag too, but only for masks: see ArgumentPlan::selects.
  return op.hasTag(at::Tag::dynamic_output_shape) && op.operator_name().name != "aten::index";
}

using Waits = bool (*)(const c10::IValue* arguments);

// As the sources of torch have it.
Waits waits_on_gpu(const std::string& op) {
  const Waits to_see_errors = [](const c10::IValue*) { return true; };
  static const std::unordered_map<std::string, Waits> rules = {
      {"aten::_linalg_svd", to_see_errors},
      {"aten::_linalg_eigh", to_see_errors},
      {"aten::linalg_eig", to_see_errors},
      {"aten::_linalg_eigvals", to_see_errors},
      {"aten::linalg_lstsq", to_see_errors},
      // (input, bins, min, max): without limits they are those of the values.
      {"aten::histc",
       [](const c10::IValue* arguments) {
         return arguments[2].toScalar().toDouble() == arguments[3].toScalar().toDouble();
       }},
      // (input, samples, with_replacement): it looks for weights that are none.
      {"aten::multinomial",
       [](const c10::IValue* arguments) { return arguments[1].toInt() == 1 || !arguments[2].toBool(); }},
  };
  const auto found = rules.find(op);
  return kDevice == c10::kCUDA && found != rules.end() ? found->second : nullptr;
}

bool leaves_elements_alone(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names = {
      "aten::empty",
      "aten::empty_like",
      "aten::_empty_affine_quantized",
      "aten::_empty_per_channel_affine_quantized",
      "aten::_coalesced_",
      "aten::resize_as_sparse_",
      "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_",
      "aten::_sparse_coo_tensor_with_dims",
      "aten::_sparse_coo_tensor_with_dims_and_tensors",
  };
  if (op.hasTag(at::Tag::inplace_view) || names.count(op.operator_name().name)) {
    return true;
  }
  const auto& returns = op.schema().returns();
  const bool returns_numbers = !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto& result) {
    const auto kind = result.type()->kind();
    return kind != Kind::TensorType && kind != Kind::ListType;
  });
  return returns_numbers && !waits_for_values(op);
}

} // namespace

OperatorPlan::OperatorPlan(c10::OperatorHandle handle)
    : op(std::move(handle)),
      arguments(op.schema().arguments().size()),
      returns(op.schema().returns().size()),
      dropout(dropout_of(op)),
      can_wait(op.operator_name().name.rfind("aten::", 0) == 0 &&
               op.operator_name().name.find("quantize") == std::string::npos),
      waits_for_values(simulated::waits_for_values(op)),
      waits_on_gpu(simulated::waits_on_gpu(op.operator_name().name)),
      leaves_elements_alone(simulated::leaves_elements_alone(op)),
      asks_about_shapes(op.operator_name().name == "aten::_fused_sdp_choice") {
  const auto& name = op.operator_name().name;
  for (uint32_t i = 0; i < arguments; ++i) {
    const auto& argument = op.schema().arguments()[i];
    if (is_plain(*argument.type())) {
      continue;
    }
    // As in torch.cuda._sanitizer, an alias that is not written is the base of a view. That is not a read.
    const auto* alias = argument.alias_info();
    places.push_back({argument.name().c_str(), i, !alias, alias && alias->isWrite(),
                      !alias && is_written_unsaid(name, argument.name()),
                      !alias && is_written_in_training(name, argument.name()),
                      simulated::may_be_on_the_cpu(name, argument.name()), is_optional_generator(*argument.type()),
                      name == "aten::index" && argument.name() == "indices", is_overwritten(op, argument)});
  }
}

OperatorPlan::OperatorPlan(c10::OperatorHandle handle, c10::KernelFunction function) : OperatorPlan(std::move(handle)) {
  kernel = std::move(function);
}

} // namespace simulated
