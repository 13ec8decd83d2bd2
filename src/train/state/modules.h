#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera {

/// Cuts parameters, given by name, into what full sharding gathers at a time: each layer, and each
/// weight of the embedding and the head by itself, since a tied embedding is a weight of both.
std::vector<std::vector<size_t>> list_modules(const std::vector<std::string>& parameters);

}  // namespace tessera
