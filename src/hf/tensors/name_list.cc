#include "hf/tensors/name_list.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "core/config/strict_json.h"

namespace tessera {

std::string list_names(const std::vector<std::string>& names) {
  constexpr size_t kMost = 40;
  std::vector<std::string> shown;
  for (const std::string& name : std::span(names).first(std::min(kMost, names.size()))) {
    shown.push_back(quote_for_message(name));
  }
  const std::string text = fmt::format("{}", fmt::join(shown, ", "));
  return names.size() <= kMost ? text : fmt::format("{} and {} more", text, names.size() - kMost);
}

}  // namespace tessera
