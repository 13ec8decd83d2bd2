#pragma once

#include "program/program.h"

namespace tessera {

/// Operators that have a value at hand give what quantizes it too (GivesQuantized), so that nothing
/// reads it again for that. The same bits.
Program fuse_quantize(const Program& program);

}  // namespace tessera
