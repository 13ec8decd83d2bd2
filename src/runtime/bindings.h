#pragma once

#include <vector>

#include "core/memory.h"
#include "ops/backend.h"
#include "program/memory_plan.h"
#include "runtime/elastic_slabs.h"

namespace tessera {

/// The memory of one run of a program. `tensors` holds every bound value
/// (inputs, weights, accumulators, outputs) at its bound; the slabs are at least as large as the
/// plan says and 64-byte aligned.
struct Bindings {
  IdVector<ValueId, Tensor> tensors;
  std::byte* saved = nullptr;
  std::byte* offloaded = nullptr;
  std::byte* transient = nullptr;
  /// Where the slabs' memory comes as rows do; null: all is there.
  ElasticSlabs* elastic = nullptr;
  /// Accumulators that hold nothing yet, rather than a sum to add to.
  std::vector<ValueId> unset;
};

}  // namespace tessera
