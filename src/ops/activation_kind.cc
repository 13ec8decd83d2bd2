#include "ops/activation_kind.h"

#include <fmt/format.h>

namespace tessera {

std::string to_string(const ActivationFunction& function) {
  const std::string_view name = activation_name(function.kind);
  return is_clamped(function.kind) ? fmt::format("{} limit={}", name, function.limit)
                                   : std::string(name);
}

}  // namespace tessera
