#pragma once

#include "runtime/bindings.h"

namespace tessera {

/// Where values of that storage begin; not of bound ones.
inline std::byte* slab_of(const Bindings& bindings, Storage storage) {
  return storage == Storage::kSaved       ? bindings.saved
         : storage == Storage::kOffloaded ? bindings.offloaded
                                          : bindings.transient;
}

}  // namespace tessera
