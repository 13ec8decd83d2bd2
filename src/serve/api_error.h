#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera {

/// A request that is answered with an error in the form of OpenAI's API.
class ApiError : public std::runtime_error {
 public:
  /// `status`: that of HTTP. `type` and `code`: OpenAI's; `param`: the field at fault, or "".
  ApiError(int status, std::string type, const std::string& message, std::string param = "",
           std::string code = "")
      : std::runtime_error(message),
        status_(status),
        type_(std::move(type)),
        param_(std::move(param)),
        code_(std::move(code)) {}

  int status() const { return status_; }
  nlohmann::json body() const;

 private:
  int status_;
  std::string type_, param_, code_;
};

/// A field that is wrong.
[[noreturn]] inline void refuse_field(const std::string& field, const std::string& message,
                                      const std::string& code = "") {
  throw ApiError(400, "invalid_request_error", message, field, code);
}

}  // namespace tessera
