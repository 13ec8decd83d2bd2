#pragma once

#include "model/run/saved_placement.h"

namespace tessera {

/// Bytes of the slabs that all programs of a rank share.
struct SlabBytes {
  int64_t saved = 0;
  int64_t transient = 0;
  int64_t total() const { return saved + transient; }
};

/// Whether slabs get memory page by page: where programs have elastic values (see RowPlan) and
/// balanced routing then takes less.
bool comes_by_pages(const StagePrograms& programs, const SavedPlacement& placement);

/// At the bounds of all values.
SlabBytes bound_slab_bytes(const StagePrograms& programs, const SavedPlacement& placement);

/// What a step takes where in every layer `skew` times the rows of balanced routing come: the pages
/// that some program wants.
SlabBytes skewed_slab_bytes(const StagePrograms& programs, const SavedPlacement& placement,
                            double skew = 1);

}  // namespace tessera
