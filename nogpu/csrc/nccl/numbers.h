// Arithmetic of NCCL's reductions on host memory. Knows dtypes, but no ranks, streams or communicators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nccl {

// Reduces `terms`, in their order, elements [begin, begin + count) of each, into `out`. Floats of 16 and 8 bits are
// added in float32 and rounded once. An average is the sum divided by the number of terms, as C divides. With
// `factors`, every term is multiplied by its factor first. `out` may be the same elements as those of any term.
void reduce(int32_t dtype, int32_t op, const std::vector<const char*>& terms, const std::vector<double>& factors,
            size_t begin, size_t count, char* out);

// A number of the dtype in host memory.
double read_number(int32_t dtype, const void* address);

} // namespace nccl
