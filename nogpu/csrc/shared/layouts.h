// Takes sparse, compressed and nested tensors apart into strided ones, and puts them together on another device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace simulated::layouts {

bool is_strided(const at::Tensor& tensor);

// A strided tensor over the storage, with the shape and dtype of `like`, and quantised, lazily conjugated or negated
// like it.
at::Tensor strided(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

// True for a plain strided CPU tensor with memory, if the caller has the only reference to the tensor and to its
// storage.
bool is_plain_and_unshared(const at::Tensor& tensor);
// Makes the tensor one of `device`, after its storage has become one of that device. Returns the same tensor.
at::Tensor now_on(at::Tensor&& tensor, c10::Device device);

// The strided tensors that a tensor of another layout is made of. The array ends with undefined tensors if there are
// fewer than three. Throws c10::NotImplementedError, with the name of the operator, for layouts that are not supported.
using Members = std::array<at::Tensor, 3>;
Members members(const at::Tensor& tensor, const std::string& op);

// A tensor with the layout and shape of `like`, made of these members, on their device.
at::Tensor made_of(const Members& members, const at::Tensor& like, c10::Device device);
// Gives an existing tensor these members and the shape of `like`.
void set_members(const at::Tensor& tensor, const Members& members, const at::Tensor& like);

} // namespace simulated::layouts
