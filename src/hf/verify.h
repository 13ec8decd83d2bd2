#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hf/transfer/transfer.h"

namespace tessera {

/// Called with the bytes done since the last call; may throw to stop the conversion.
using AdvanceProgress = std::function<void(int64_t num_bytes)>;

struct VerifyRequest {
  std::vector<std::string> names;  ///< of the source's tensors
  Plan back;                       ///< how each comes from the target's tensors
  ElementSource* source = nullptr;
  ElementSource* target = nullptr;
  AdvanceProgress advance;
};

/// What the comparison found; it throws where anything differs.
struct VerifyReport {
  int64_t num_tensors = 0;
  int64_t num_narrowed = 0;  ///< equal only after rounding the source as the conversion does
};

/// Maps the written tensors back and compares the hash of each with that of its source: bit for bit
/// where the target's type holds the source's values, else after the same rounding. Throws
/// UserError with the names that differ.
VerifyReport verify_round_trip(const VerifyRequest& request);

/// Throws UserError unless the elements of the target that no block makes are all zero.
void verify_padding(const std::vector<MappedTensor>& tensors, const Plan& plan,
                    ElementSource& target);

}  // namespace tessera
