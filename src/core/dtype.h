#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace tessera {

/// Element types of tensors. What holds of each is in one table (dtype.cc). F16
/// (core/half.h) is an operand of products; E4M3 and E5M2 (core/fp8.h) are those of scaled ones.
enum class DType : uint8_t { kF32, kBF16, kI32, kI64, kF64, kU8, kU16, kF16, kE4M3, kE5M2 };

/// Bytes of one element.
int64_t dtype_size(DType dtype);

/// "f32", "bf16", "i32", "i64", "f64", "u8", "u16", "f16", "e4m3", "e5m2".
std::string_view dtype_name(DType dtype);

/// Whether activations and matrix weights may be stored as this type: kernels of layers take it.
bool is_storage(DType dtype);

/// Whether a storage type has fewer digits than the F32 in which sums are made, so that what is
/// stored is rounded, and trained weights have an F32 copy beside them.
bool is_low_precision(DType dtype);

/// Whether products read the type: the storage types, and F16.
bool is_factor(DType dtype);

/// The type of a product of such factors: theirs, or F32 of F16.
DType product_dtype(DType factor);

/// The top half of a float32, rounded to nearest even. Arithmetic happens in float.
struct Bf16 {
  uint16_t bits = 0;

  Bf16() = default;
  explicit Bf16(float value) : bits(round(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

 private:
  static uint16_t round(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffU) > 0x7f800000U)
      return static_cast<uint16_t>((word >> 16) | 0x40U);  // keep NaN a NaN
    return static_cast<uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
  }
};
static_assert(sizeof(Bf16) == 2);

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<Bf16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct DTypeOf<uint16_t> {
  static constexpr DType value = DType::kU16;
};

}  // namespace tessera
