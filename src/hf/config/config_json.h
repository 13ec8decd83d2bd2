#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "hf/family/family.h"

namespace tessera {

/// A config.json over the defaults of its family. Construction accounts for every key of the file:
/// read by the family, without effect on the model, or of the only value that is supported.
/// Anything else throws UserError by name. Getters throw UserError for a value of the wrong type.
class ConfigJson {
 public:
  /// `where` names the file in messages.
  ConfigJson(std::string_view text, std::string where);

  const Family& family() const { return *family_; }
  const std::string& where() const { return where_; }
  /// The name that the family's files have for a key, for messages.
  std::string spelled(std::string_view key) const;
  /// Whether the family knows the key, or the file has it.
  bool has(std::string_view key) const;
  /// A missing key counts as null.
  bool is_null(std::string_view key) const;
  /// An integer from `min` to 2^31 - 1.
  int64_t size(std::string_view key, int64_t min = 1) const;
  /// The same, at most `most`: a size that a configuration of Tessera may have too.
  int64_t bounded(std::string_view key, int64_t least, int64_t most) const;
  std::optional<int64_t> optional_size(std::string_view key, int64_t min = 1) const;
  double number(std::string_view key) const;
  /// The same, above 0.
  double positive(std::string_view key) const;
  bool flag(std::string_view key) const;
  const std::string& text(std::string_view key) const;
  const nlohmann::json& value(std::string_view key) const;

 private:
  void merge(const nlohmann::json& file);

  std::string where_;
  const Family* family_ = nullptr;
  std::shared_ptr<nlohmann::json> values_;
};

/// Where the file is of a model with encoders of images (Family::whole), the config.json of its
/// text part alone.
std::optional<std::string> find_text_config(std::string_view text, const std::string& where);

/// The names by which one and the same value goes in different families, e.g. of the number of
/// experts; the one that `family` declares.
std::string_view canonical_key(const Family& family, std::string_view key);
/// The name that files of `family` have for a key that it reads.
std::string file_key(const Family& family, std::string_view key);

}  // namespace tessera
