#pragma once

#include <span>

#include "hf/family/family.h"

namespace tessera {

// The parts of families().

/// Families whose layers' mixers are alike but for a window (families.cc).
std::span<const Family> alike_families();
/// Families whose layers' mixers differ: in kind, or in how they rotate (mixed_families.cc).
std::span<const Family> mixed_families();
/// Families with compressed attention (compressed_families.cc).
std::span<const Family> compressed_families();

}  // namespace tessera
