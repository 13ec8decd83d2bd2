#include "hf/transfer/scaled_matrices.h"

#include <algorithm>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/fp8.h"
#include "hf/family/packed_tensors.h"
#include "hf/transfer/elements.h"

namespace tessera {
namespace {

constexpr std::string_view kSuffix = "_scale_inv";

int64_t blocks_of(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

/// The scales of one row's blocks, from block `first` on.
std::vector<float> read_scales(const HfTensor& scales, int64_t first, int64_t count) {
  const DType dtype = scales.entry->dtype;
  std::vector<float> values(count);
  convert_elements(scales.bytes().data() + first * dtype_size(dtype), dtype,
                   reinterpret_cast<std::byte*>(values.data()), DType::kF32, count);
  return values;
}

void check_scales(const HfTensor& matrix, const HfTensors& tensors, const std::string& name,
                  const std::optional<BlockScales>& blocks) {
  const std::string file = matrix.file->path().string();
  const std::string quoted = quote_for_message(name);
  require(blocks.has_value(),
          "{}: tensor {} is of type e4m3, but config.json has no 'quantization_config' that says "
          "how it is scaled",
          file, quoted);
  const Shape& shape = matrix.entry->shape;
  require(shape.rank() == 2,
          "{}: tensor {} of type e4m3 is {}; only matrices may have block scales", file, quoted,
          shape.to_string());
  const HfTensor* scales = find_scales(tensors, name);
  require(scales != nullptr, "{}: tensor {} is of type e4m3, but its scales {}{} are missing", file,
          quoted, name, kSuffix);
  const Shape expected{blocks_of(shape[0], blocks->rows), blocks_of(shape[1], blocks->cols)};
  require(is_float_storage(scales->entry->dtype) && scales->entry->shape == expected,
          "{}: the scales {}{} are {} {}; blocks of {} x {} of {} have f32, bf16 or f16 {}",
          scales->file->path().string(), name, kSuffix, dtype_name(scales->entry->dtype),
          scales->entry->shape.to_string(), blocks->rows, blocks->cols, shape.to_string(),
          expected.to_string());
}

}  // namespace

const HfTensor* find_scales(const HfTensors& tensors, const std::string& name) {
  return tensors.find(name + std::string(kSuffix));
}

std::vector<std::string> list_scales(const HfTensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors.all()) {
    if (!name.ends_with(kSuffix)) continue;
    const HfTensor* matrix = tensors.find(name.substr(0, name.size() - kSuffix.size()));
    if (matrix != nullptr && matrix->entry->dtype == DType::kE4M3) names.push_back(name);
  }
  return names;
}

void check_stored_types(const TensorMap& map, const HfTensors& tensors,
                        const std::optional<BlockScales>& blocks, bool mxfp4) {
  for (const MappedTensor& tensor : map.hf) {
    if (tensors.find(tensor.name) == nullptr) {
      require(mxfp4,
              "{}: tensor {} has MXFP4 numbers, and only a folder whose config.json says so in "
              "'quantization_config' is converted; convert it first",
              tensors.path().string(), quote_for_message(packed_blocks_name(tensor.name)));
      continue;
    }
    const HfTensor& found = *tensors.find(tensor.name);
    if (tensor.is_whole_numbers) {
      require(is_whole_storage(found.entry->dtype),
              "{}: tensor {} is of type {}; a table of experts must be of I64 or I32",
              found.file->path().string(), quote_for_message(tensor.name),
              dtype_name(found.entry->dtype));
      continue;
    }
    if (is_float_storage(found.entry->dtype)) continue;
    require(found.entry->dtype == DType::kE4M3,
            "{}: tensor {} is of type {}; weights must be F32, BF16 or F16, or E4M3 with scales",
            found.file->path().string(), quote_for_message(tensor.name),
            dtype_name(found.entry->dtype));
    check_scales(found, tensors, tensor.name, blocks);
  }
}

void read_scaled(const HfTensor& matrix, const HfTensor& scales, const BlockScales& blocks,
                 int64_t begin, std::span<float> to) {
  const int64_t cols = matrix.entry->shape[1];
  const auto* const codes = reinterpret_cast<const uint8_t*>(matrix.bytes().data());
  const int64_t across = blocks_of(cols, blocks.cols);
  const int64_t end = begin + std::ssize(to);
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / cols;
    const int64_t row_end = std::min((row + 1) * cols, end);
    const std::vector<float> own = read_scales(scales, row / blocks.rows * across, across);
    for (; at < row_end; ++at) {
      E4m3 number;
      number.bits = codes[at];
      to[at - begin] = static_cast<float>(number) * own[at % cols / blocks.cols];
    }
  }
}

}  // namespace tessera
