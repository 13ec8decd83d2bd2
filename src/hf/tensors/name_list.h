#pragma once

#include <string>
#include <vector>

namespace tessera {

/// "a, b, c" for a message; of a long list the first ones and how many more there are.
std::string list_names(const std::vector<std::string>& names);

}  // namespace tessera
