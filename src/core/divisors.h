#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// "2 or 4": the divisors of `number` nearest to `wanted`, one not above it and one not below; one
/// alone where there is no other. Both are at least 1.
std::string nearest_divisors(int64_t number, int64_t wanted);

}  // namespace tessera
