#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// The known name nearest to `name` by edit distance, or "" where none is near enough to be meant.
std::string nearest_name(std::string_view name, std::span<const std::string> known);

/// "; did you mean 'hidden_size'?" or "" where nothing is near.
std::string did_you_mean(std::string_view name, std::span<const std::string> known);

}  // namespace tessera
