#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ops/testing/gpu_check.h"

namespace tessera::testing {

/// A check that owns the values that it is given.
struct OwningCheck : GpuCheck {
  void give(const std::string& name, OwnedTensor value) {
    values.insert_or_assign(name, value.get());
    owned_.push_back(std::move(value));
  }

 private:
  std::vector<OwnedTensor> owned_;
};

}  // namespace tessera::testing
