// Strided, sparse, compressed and nested tensors taken apart into strided ones and put together on another device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace simulated::layouts {

bool is_strided(const at::Tensor& tensor);

// A strided tensor over the storage, with the shape, dtype and lazy bits of `like`.
at::Tensor strided(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

// Whether it is a tensor of the CPU like those of `strided`, with memory, and only the caller knows it and its storage.
bool is_plain_and_unshared(const at::Tensor& tensor);
// The same tensor, after its storage has become one of this device.
at::Tensor now_on(at::Tensor&& tensor, c10::Device device);

// The strided tensors that a tensor of another layout is made of; undefined ones at the end. Throws
// c10::NotImplementedError, with the name of the operator, for layouts that are not known here.
using Members = std::array<at::Tensor, 3>;
Members members(const at::Tensor& tensor, const std::string& op);

// A tensor of the layout and shape of `like`, of these members, on their device.
at::Tensor made_of(const Members& members, const at::Tensor& like, c10::Device device);
// The same for a tensor that there is.
void set_members(const at::Tensor& tensor, const Members& members, const at::Tensor& like);

} // namespace simulated::layouts
