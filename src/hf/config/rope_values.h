#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "hf/family/family.h"

namespace tessera {

/// The name that transformers has for a way to stretch rotations.
std::string_view rope_type_name(RopeScaling scaling);

/// An object of rope parameters with getters that take "missing" and null as one. They throw
/// UserError for what is not of the kind that is asked for.
class RopeValues {
 public:
  /// Throws UserError for a key that no type of rotation has.
  RopeValues(nlohmann::json values, std::string where, const Family& family);

  const std::string& where() const { return where_; }
  bool has(const char* key) const { return values_.contains(key) && !values_[key].is_null(); }
  double number(const char* key) const;
  double number(const char* key, double otherwise) const {
    return has(key) ? number(key) : otherwise;
  }
  double positive(const char* key) const;
  std::vector<double> positives(const char* key) const;
  bool flag(const char* key, bool otherwise) const;
  /// Gemma 4's type of pairs of the whole head.
  bool is_proportional() const;
  /// Throws UserError for a type that the family cannot have.
  RopeScaling scaling() const;

 private:
  std::string type() const;
  RopeScaling long_scaling(const std::string& name) const;

  nlohmann::json values_;
  std::string where_;
  bool takes_proportional_;
  bool takes_long_;
};

}  // namespace tessera
