#include "core/config/strict_json.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Walks the text once without building anything, so that depth and duplicates are known before
/// memory is taken.
class StrictChecker : public nlohmann::json_sax<json> {
 public:
  StrictChecker(std::string_view where, int max_depth) : where_(where), max_depth_(max_depth) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool start_array(size_t) override { return enter(); }
  bool end_array() override { return leave(); }

  bool key(string_t& name) override {
    require(keys_.back().insert(name).second, "{}: the JSON names {} twice", where_,
            quote_for_message(name));
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    user_error("{}: not valid JSON near byte {}", where_, position);
  }

 private:
  bool enter() {
    require(std::cmp_less(keys_.size(), max_depth_), "{}: the JSON nests deeper than {} levels",
            where_, max_depth_);
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  std::string_view where_;
  int max_depth_;
  std::vector<std::unordered_set<std::string>> keys_;
};

struct FileDType {
  std::string_view name;
  DType dtype;
};
/// A type is written by the first of its names. Signed bytes and exponents of E8M0 are read as
/// bytes, which those who take them interpret.
constexpr std::array<FileDType, 11> kFileDTypes = {{{"F32", DType::kF32},
                                                    {"BF16", DType::kBF16},
                                                    {"I32", DType::kI32},
                                                    {"I64", DType::kI64},
                                                    {"F64", DType::kF64},
                                                    {"U8", DType::kU8},
                                                    {"U16", DType::kU16},
                                                    {"F16", DType::kF16},
                                                    {"F8_E4M3", DType::kE4M3},
                                                    {"I8", DType::kU8},
                                                    {"F8_E8M0", DType::kU8}}};

}  // namespace

json parse_strict_json(std::string_view text, std::string_view where, int max_depth) {
  StrictChecker checker(where, max_depth);
  json::sax_parse(text.begin(), text.end(), &checker);
  return json::parse(text.begin(), text.end());
}

const json& json_member(const json& object, const char* key, std::string_view where) {
  require(object.is_object(), "{}: expected a JSON object, found {}", where, object.type_name());
  const auto member = object.find(key);
  require(member != object.end(), "{}: '{}' is missing", where, key);
  return *member;
}

void require_members(const json& object, std::initializer_list<std::string_view> keys,
                     std::string_view where) {
  require(object.is_object(), "{}: expected a JSON object, found {}", where, object.type_name());
  for (const auto& [key, value] : object.items()) {
    require(std::ranges::find(keys, key) != keys.end(), "{}: unknown member {}; expected {}", where,
            quote_for_message(key), fmt::join(keys, ", "));
  }
}

int64_t json_size(const json& value, std::string_view what, std::string_view where) {
  constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  require(value.is_number_unsigned() && value.get<uint64_t>() <= kMax,
          "{}: {} must be an integer from 0 to 2^63 - 1, found {}", where, what,
          value.is_number() ? value.dump() : value.type_name());
  return value.get<int64_t>();
}

const std::string& json_text(const json& value, std::string_view what, std::string_view where) {
  require(value.is_string(), "{}: {} must be a string, found {}", where, what, value.type_name());
  return value.get_ref<const std::string&>();
}

Shape json_dims(const json& value, std::string_view what, std::string_view where) {
  require(value.is_array() && value.size() <= Shape::kMaxRank,
          "{}: {} must be a list of at most {} sizes, found {}", where, what, Shape::kMaxRank,
          value.is_array() ? fmt::format("{} of them", value.size()) : value.type_name());
  std::vector<int64_t> dims;
  for (const json& dim : value) dims.push_back(json_size(dim, what, where));
  return Shape(dims);
}

Shape json_shape(const json& value, std::string_view where) {
  constexpr int64_t kMaxElementBytes = 8;
  const Shape shape = json_dims(value, "shape", where);
  int64_t product = kMaxElementBytes;
  for (const int64_t dim : shape.dims()) {
    require(!__builtin_mul_overflow(product, std::max<int64_t>(dim, 1), &product),
            "{}: shape {} has more elements than a tensor can hold", where, shape.to_string());
  }
  return shape;
}

std::string_view file_dtype_name(DType dtype) {
  const auto* found = std::ranges::find(kFileDTypes, dtype, &FileDType::dtype);
  ensure(found != kFileDTypes.end(), "element type {} has no name in files", dtype_name(dtype));
  return found->name;
}

DType json_dtype(const json& value, std::string_view where) {
  const std::string& name = json_text(value, "dtype", where);
  std::array<std::string_view, kFileDTypes.size()> known;
  for (size_t i = 0; i < known.size(); ++i) {
    if (name == kFileDTypes[i].name) return kFileDTypes[i].dtype;
    known[i] = kFileDTypes[i].name;
  }
  user_error("{}: dtype {} is not supported; expected {}; convert the file first", where,
             quote_for_message(name), fmt::join(known, ", "));
}

std::string json_quote(std::string_view text) {
  return json(text).dump();
}

std::string quote_for_message(std::string_view text) {
  constexpr size_t kLongest = 160;
  std::string quoted = "'";
  for (const char c : text.substr(0, kLongest)) {
    const auto code = static_cast<unsigned char>(c);
    quoted += code < 0x20 || code == 0x7f ? fmt::format("\\x{:02x}", code) : std::string(1, c);
  }
  return quoted + (text.size() > kLongest ? "'..." : "'");
}

}  // namespace tessera
