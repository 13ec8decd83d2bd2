#include "runtime/elastic_slabs.h"

#include "core/error.h"

namespace tessera {

void ElasticSlabs::commit(const std::byte* begin, int64_t num_bytes) {
  if (num_bytes == 0) return;
  for (ElasticMemory* slab : {&saved_, &transient_}) {
    if (!slab->contains(begin)) continue;
    const int64_t offset = begin - slab->data();
    return slab->commit(offset, offset + num_bytes);
  }
  throw InternalError("memory was asked for at an address of neither slab");
}

std::optional<int64_t> ElasticSlabs::find_rows(const void* extent) const {
  const auto found = rows_.find(extent);
  return found == rows_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace tessera
