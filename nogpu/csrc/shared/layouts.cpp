#include "layouts.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/CPUAllocator.h>

#include "keys.h"
#include "storages.h"

namespace simulated::layouts {
namespace {

bool is_compressed(const at::Tensor& tensor) {
  const auto layout = tensor.layout();
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr || layout == c10::kSparseBsc;
}

// These use the accessors of the implementations. The operators of the same names would call this file again.
at::SparseTensorImpl* sparse(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::SparseCsrTensorImpl* compressed(const at::Tensor& tensor) {
  return static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::native::NestedTensorImpl* nested(const at::Tensor& tensor) {
  return static_cast<at::native::NestedTensorImpl*>(tensor.unsafeGetTensorImpl());
}

c10::DispatchKeySet keys(c10::Device device, c10::DispatchKey on_cpu, c10::DispatchKey simulated) {
  return c10::DispatchKeySet(device.is_cpu() ? on_cpu : simulated);
}

// How a tensor is quantised. Scales of channels are tensors themselves, which go where the quantised one is needed.
at::QuantizerPtr quantizer_of(const at::Tensor& like, bool on_cpu) {
  const auto quantizer = at::get_qtensorimpl(like)->quantizer();
  const auto scheme = quantizer->qscheme();
  if (scheme != c10::kPerChannelAffine && scheme != c10::kPerChannelAffineFloatQParams) {
    return quantizer;
  }
  const auto there = [on_cpu](const at::Tensor& tensor) {
    if (tensor.is_cpu() == on_cpu) {
      return tensor;
    }
    if (on_cpu) {
      return strided(storage_over(tensor.storage(), c10::kCPU), c10::DispatchKey::CPU, tensor);
    }
    return tensor.clone().to(kDevice); // it may stand for an argument, in memory that is none of the host
  };
  const auto& channels = static_cast<const at::PerChannelAffineQuantizer&>(*quantizer);
  return at::make_per_channel_affine_quantizer(there(channels.scales()), there(channels.zero_points()), channels.axis(),
                                               quantizer->scalar_type());
}

at::Tensor quantized(c10::Storage storage, bool on_cpu, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<at::QTensorImpl>(
      std::move(storage), c10::DispatchKeySet(on_cpu ? c10::DispatchKey::QuantizedCPU : kQuantizedKey), like.dtype(),
      quantizer_of(like, on_cpu));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

} // namespace

bool is_strided(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested();
}

at::Tensor strided(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  if (like.is_quantized()) {
    return quantized(std::move(storage), key == c10::DispatchKey::CPU, like);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    impl->_set_conj(true);
  }
  if (like.is_neg()) {
    impl->_set_neg(true);
  }
  return tensor;
}

bool is_plain_and_unshared(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto keys =
      impl->key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
  if (tensor.use_count() != 1 || keys != c10::DispatchKeySet(c10::DispatchKey::CPU) || impl->autograd_meta() ||
      !impl->allow_tensor_metadata_change() || impl->is_wrapped_number()) {
    return false;
  }
  const auto& storage = tensor.storage();
  return storage.use_count() == 1 && storage.resizable() && storage.allocator() == c10::GetCPUAllocator() &&
      storage.nbytes() > 0;
}

at::Tensor now_on(at::Tensor&& tensor, c10::Device device) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(tensor.storage()); // also sets the device of the tensor
  impl->_change_backend_component_keys(device);
  return std::move(tensor);
}

Members members(const at::Tensor& tensor, const std::string& op) {
  if (tensor.is_nested()) {
    return {nested(tensor)->get_unsafe_storage_as_tensor(), at::Tensor(), at::Tensor()};
  }
  if (tensor.is_sparse()) {
    return {sparse(tensor)->indices(), sparse(tensor)->values(), at::Tensor()};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(is_compressed(tensor), op, " of a ", tensor.layout(), " tensor on ", tensor.device().str(),
                              ": simulated devices have strided, sparse and nested tensors only");
  const auto* impl = compressed(tensor);
  return {impl->compressed_indices(), impl->plain_indices(), impl->values()};
}

at::Tensor made_of(const Members& members, const at::Tensor& like, c10::Device device) {
  if (like.is_nested()) {
    // Its shapes are in host memory on every device.
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        members[0], nested(like)->get_nested_sizes(), nested(like)->get_nested_strides(),
        nested(like)->get_storage_offsets());
  }
  at::Tensor made;
  if (like.is_sparse()) {
    made = at::detail::make_tensor<at::SparseTensorImpl>(
        keys(device, c10::DispatchKey::SparseCPU, kSparseKey), like.dtype());
  } else {
    made = at::detail::make_tensor<at::SparseCsrTensorImpl>(
        keys(device, c10::DispatchKey::SparseCsrCPU, kSparseCsrKey), device, like.layout(),
        like.dtype());
  }
  set_members(made, members, like);
  return made;
}

void set_members(const at::Tensor& tensor, const Members& members, const at::Tensor& like) {
  if (like.is_nested()) {
    return; // no operator changes the shapes of a nested tensor
  }
  if (like.is_sparse()) {
    auto* impl = sparse(tensor);
    impl->raw_resize_(sparse(like)->sparse_dim(), sparse(like)->dense_dim(), like.sizes());
    impl->set_indices_and_values_unsafe(members[0], members[1]);
    impl->set_coalesced(sparse(like)->coalesced());
  } else {
    compressed(tensor)->set_member_tensors(members[0], members[1], members[2], like.sizes());
  }
}

} // namespace simulated::layouts
