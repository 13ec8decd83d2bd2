#pragma once

#include <ostream>
#include <span>
#include <string_view>

#include "train/setup/settings.h"

namespace tessera::testing {

/// One family of options of a run on one rank.
struct OptionFamily {
  std::string_view name;
  void (*change)(Settings&);
};
void PrintTo(const OptionFamily& family, std::ostream* out);

/// Every family that changes which operators run, or how.
std::span<const OptionFamily> option_families();

/// A small model on random tokens, of sizes that the tensor cores' kernels take in BF16, with what
/// the family changes.
Settings settings_of(const OptionFamily& family);

}  // namespace tessera::testing
