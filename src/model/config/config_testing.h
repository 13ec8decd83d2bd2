#pragma once

#include "model/weights/parameters.h"

namespace tessera::testing {

/// Elements of all parameters that a model's programs have.
inline int64_t count_listed(const ModelConfig& config) {
  int64_t count = 0;
  for (const ParameterSpec& spec : list_parameters(config, DType::kF32))
    count += spec.shape.num_elements();
  return count;
}

}  // namespace tessera::testing
