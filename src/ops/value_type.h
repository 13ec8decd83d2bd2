#pragma once

#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <string>

#include "core/format.h"

namespace tessera {

/// Index of a value in its program; none by default. Numbers become ids, but ids become numbers
/// only where that is asked for.
class ValueId {
 public:
  constexpr ValueId() = default;
  constexpr ValueId(int32_t index) : index_(index) {}

  constexpr int32_t index() const { return index_; }
  constexpr explicit operator size_t() const { return static_cast<size_t>(index_); }
  constexpr bool is_set() const { return index_ >= 0; }
  constexpr ValueId& operator++() {
    ++index_;
    return *this;
  }
  constexpr auto operator<=>(const ValueId&) const = default;  // NOLINT(modernize-use-nullptr)

 private:
  int32_t index_ = -1;
};

/// Where the actual extent of a ragged dim is: an I64 scalar value of the program; or, in the
/// result of a shape rule, an output or input of the operator itself, which the program replaces by
/// the value that stands there.
class Extent {
 public:
  enum class Kind : uint8_t { kNone, kValue, kOwnOutput, kOwnInput };

  constexpr Extent() = default;
  constexpr Extent(ValueId value)
      : kind_(value.is_set() ? Kind::kValue : Kind::kNone), index_(value.index()) {}
  constexpr Extent(int32_t value) : Extent(ValueId(value)) {}
  static constexpr Extent own_output(int output) { return {Kind::kOwnOutput, output}; }
  static constexpr Extent own_input(int input) { return {Kind::kOwnInput, input}; }

  constexpr Kind kind() const { return kind_; }
  /// Of the value, output or input; -1: none.
  constexpr int32_t index() const { return index_; }
  /// Throws InternalError where it is none.
  ValueId value() const {
    ensure(kind_ == Kind::kValue, "an extent that is no value of a program was asked for as one");
    return index_;
  }
  constexpr bool operator==(const Extent&) const = default;
  /// "%3", "output 3", "input 3", "nothing".
  std::string to_string() const;

 private:
  constexpr Extent(Kind kind, int32_t index) : kind_(kind), index_(index) {}

  Kind kind_ = Kind::kNone;
  int32_t index_ = -1;
};

/// What is known of a value before it runs. At most one dim is *ragged*: its extent in `shape` is
/// the upper bound, and the actual one is where `extent` says, computed at run time.
struct ValueType {
  DType dtype = DType::kF32;
  Shape shape;
  int ragged_dim = -1;
  Extent extent;
  ScaleLayout scale = {};

  bool ragged() const { return ragged_dim >= 0; }
  Format format() const { return {dtype, scale}; }
  /// Scales included.
  int64_t num_bytes() const { return format().num_bytes(shape); }
  bool operator==(const ValueType&) const = default;
  /// "bf16 [<=4096 by %7, 512]".
  std::string to_string() const;
};

/// `type` with another element type or another shape; raggedness is kept.
ValueType with_dtype(ValueType type, DType dtype);
ValueType with_last_dim(ValueType type, int64_t last);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::ValueId> : fmt::formatter<int32_t> {
  auto format(tessera::ValueId id, fmt::format_context& context) const {
    return fmt::formatter<int32_t>::format(id.index(), context);
  }
};
