#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optim/optimizer.h"

namespace tessera {

/// Where a parameter's state lies, in bytes from its own beginning: one run, its tensors one after
/// the other, each aligned.
struct StateLayout {
  int64_t m = 0;
  int64_t m_scale = -1;  ///< -1: not kept
  int64_t v = -1;
  int64_t v_scale = -1;
  int64_t master = -1;  ///< -1: nothing is beside the weight
  int64_t num_bytes = 0;
};

/// Only dtype and shape of the weight are read, and whether it is made of matrices.
StateLayout layout_state(const Parameter& parameter, const StateFormats& wanted);

/// Bytes of each group's state.
std::vector<int64_t> list_group_bytes(std::span<const Parameter> parameters,
                                      const StateFormats& formats, const UpdateGroups& groups);

}  // namespace tessera
