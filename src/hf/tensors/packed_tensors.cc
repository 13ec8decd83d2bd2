#include "hf/tensors/packed_tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/config/strict_json.h"
#include "core/error.h"

namespace tessera {
namespace {

/// One expert's rows [first, first + count) of N elements, decoded to `to`. Columns are taken some
/// at a time, so that what is written stays in the first cache.
void read_rows(const uint8_t* blocks, const uint8_t* scales, int64_t num_rows, int64_t num_cols,
               int64_t first, int64_t count, float* to) {
  constexpr int64_t kColumns = 16;
  const int64_t groups = num_rows / kMxfp4Block;
  for (int64_t col = 0; col < num_cols; col += kColumns) {
    const int64_t end = std::min(col + kColumns, num_cols);
    for (int64_t c = col; c < end; ++c) {
      const uint8_t* codes = blocks + c * num_rows / 2;
      for (int64_t k = first; k < first + count; ++k) {
        const int code = codes[k / 2] >> (k % 2 == 0 ? 0 : 4) & 15;
        to[(k - first) * num_cols + c] =
            kE2m1[code] * e8m0_number(scales[c * groups + k / kMxfp4Block]);
      }
    }
  }
}

}  // namespace

float e8m0_number(uint8_t code) {
  constexpr int kBias = 127;
  return code == 255 ? std::numeric_limits<float>::quiet_NaN()
                     : std::ldexp(1.0F, static_cast<int>(code) - kBias);
}

bool holds_pairs(const SafetensorsEntry& entry, const Shape& matrix) {
  return entry.dtype == DType::kU8 && matrix.rank() == 2 &&
         entry.shape == Shape{matrix[0], matrix[1] / 2} && matrix[1] % 2 == 0;
}

std::string packed_blocks_name(const std::string& name) {
  return name + "_blocks";
}

std::string packed_scales_name(const std::string& name) {
  return name + "_scales";
}

std::optional<PackedTensor> find_packed(const HfTensors& tensors, const std::string& name) {
  const HfTensor* blocks = tensors.find(packed_blocks_name(name));
  if (blocks == nullptr) return std::nullopt;
  return PackedTensor{blocks, tensors.find(packed_scales_name(name))};
}

void check_packed(const PackedTensor& packed, const std::string& name, const Shape& shape) {
  const std::string file = packed.blocks->file->path().string();
  const std::string blocks = quote_for_message(packed_blocks_name(name));
  require(packed.scales != nullptr, "{}: {} has MXFP4 numbers, but its scales {} are missing", file,
          blocks, quote_for_message(packed_scales_name(name)));
  require(shape.rank() == 3 && shape[1] % kMxfp4Block == 0,
          "{}: {} has MXFP4 numbers for {}, whose second dim is not in blocks of {}", file, blocks,
          shape.to_string(), kMxfp4Block);
  const Shape scales{shape[0], shape[2], shape[1] / kMxfp4Block};
  const Shape codes{scales[0], scales[1], scales[2], kMxfp4Block / 2};
  const auto check = [&](const HfTensor& part, const std::string& of, const Shape& expected) {
    require(part.entry->dtype == DType::kU8 && part.entry->shape == expected,
            "{}: {} is {} {}; MXFP4 numbers for {} have u8 {}", part.file->path().string(),
            quote_for_message(of), dtype_name(part.entry->dtype), part.entry->shape.to_string(),
            shape.to_string(), expected.to_string());
  };
  check(*packed.blocks, packed_blocks_name(name), codes);
  check(*packed.scales, packed_scales_name(name), scales);
}

void read_packed(const PackedTensor& packed, int64_t begin, std::span<float> to) {
  const Shape& shape = packed.scales->entry->shape;
  const int64_t num_cols = shape[1];
  const int64_t num_rows = shape[2] * kMxfp4Block;
  const auto* blocks = reinterpret_cast<const uint8_t*>(packed.blocks->bytes().data());
  const auto* scales = reinterpret_cast<const uint8_t*>(packed.scales->bytes().data());
  ensure(begin % num_cols == 0 && std::ssize(to) % num_cols == 0,
         "elements [{}, {}) of packed rows of {}", begin, begin + std::ssize(to), num_cols);
  int64_t row = begin / num_cols;
  const int64_t end = row + std::ssize(to) / num_cols;
  float* target = to.data();
  while (row < end) {
    const int64_t expert = row / num_rows;
    const int64_t first = row % num_rows;
    const int64_t count = std::min(num_rows - first, end - row);
    const int64_t numbers = expert * num_cols * num_rows;
    read_rows(blocks + numbers / 2, scales + numbers / kMxfp4Block, num_rows, num_cols, first,
              count, target);
    target += count * num_cols;
    row += count;
  }
}

}  // namespace tessera
