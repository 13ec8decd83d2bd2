#pragma once

#include <string>

namespace tessera {

/// A message that fits a screen: of a longer one the middle is left out, and how much that is says
/// the result. What users give, as a name or a value, may be of any length.
std::string shorten_message(const std::string& text);

}  // namespace tessera
