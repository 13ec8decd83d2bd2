// Any bytes are either refused with a UserError or give entries that lie within the file and cover
// its data.

#include <cstdint>
#include <cstdlib>

#include "checkpoint/format/safetensors.h"
#include "core/error.h"

namespace {

void check(bool ok) {
  if (!ok) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> file(data, size);
  try {
    const auto header = tessera::parse_safetensors(std::as_bytes(file), "fuzz");
    int64_t covered = 0;
    for (const tessera::SafetensorsEntry& entry : header.entries) {
      const int64_t num_bytes = entry.shape.num_elements() * tessera::dtype_size(entry.dtype);
      check(entry.begin >= 8 && entry.begin <= entry.end);
      check(entry.end <= static_cast<int64_t>(size) && entry.end - entry.begin == num_bytes);
      covered += num_bytes;
    }
    check(header.entries.empty() ||
          header.entries.front().begin + covered == static_cast<int64_t>(size));
  } catch (const tessera::UserError&) {
  }
  return 0;
}
