#include "serve/api_error.h"

#include <nlohmann/json.hpp>

namespace tessera {

nlohmann::json ApiError::body() const {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::json() : nlohmann::json(text);
  };
  return {{"error",
           {{"message", what()},
            {"type", type_},
            {"param", text_or_null(param_)},
            {"code", text_or_null(code_)}}}};
}

}  // namespace tessera
