#pragma once

#include <cstdint>

namespace tessera {

/// Copies between memory that may be the same or overlap; nothing where there are no bytes. Where
/// they are many the result does not pass through the caches: whoever reads it next would not find
/// it there, and to write a line would be to read it first.
void copy_bytes(const void* from, void* to, int64_t bytes);

/// In how many slices OpenMP threads copy so many bytes, and where each begins, at multiples of the
/// size of a page.
int64_t num_copy_slices(int64_t bytes);
int64_t copy_slice_begin(int64_t bytes, int64_t num_slices, int64_t slice);

}  // namespace tessera
