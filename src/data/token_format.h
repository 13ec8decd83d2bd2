#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/dtype.h"

/// The constants of token indices, see token_file.h.
namespace tessera::token_format {

inline constexpr std::array<char, 9> kMagic = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
inline constexpr uint64_t kVersion = 1;
inline constexpr int64_t kHeaderBytes = 34;

struct TypeCode {
  uint8_t code;
  DType dtype;
};
inline constexpr std::array<TypeCode, 4> kTypeCodes = {
    {{1, DType::kU8}, {4, DType::kI32}, {5, DType::kI64}, {8, DType::kU16}}};

inline uint8_t type_code(DType dtype) {
  return std::ranges::find(kTypeCodes, dtype, &TypeCode::dtype)->code;
}

/// Modes of sequences.
inline constexpr int8_t kHasLoss = 0;
inline constexpr int8_t kSilent = 1;

}  // namespace tessera::token_format
