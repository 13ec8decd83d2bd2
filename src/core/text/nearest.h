#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// "2 or 4": the divisors of `number` nearest to `wanted`, one not above it and one not below; one
/// alone where there is no other. `number` is at least 1.
std::string nearest_divisors(int64_t number, int64_t wanted);

/// "2 or 4": the two of `choices`, of which there is at least one, that are nearest to `wanted`.
std::string nearest_choices(std::vector<int64_t> choices, int64_t wanted);

}  // namespace tessera
