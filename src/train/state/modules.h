#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

/// Cuts parameters, given by their layers (ParameterSpec::layer), into what full sharding gathers
/// at a time: each layer, and each weight of none by itself, since a tied embedding is a weight of
/// both ends.
std::vector<std::vector<size_t>> list_modules(const std::vector<std::optional<int64_t>>& layers);

}  // namespace tessera
