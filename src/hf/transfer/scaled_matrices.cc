#include "hf/transfer/scaled_matrices.h"

#include <algorithm>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/fp8.h"
#include "hf/tensors/packed_tensors.h"
#include "hf/transfer/elements.h"

namespace tessera {
namespace {

constexpr std::string_view kSuffix = "_scale_inv";
constexpr BlockScales kPairBlocks{1, kMxfp4Block};

int64_t blocks_of(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

/// The scales of one row's blocks, from block `first` on.
std::vector<float> read_scales(const HfTensor& scales, int64_t first, int64_t count) {
  const DType dtype = scales.entry->dtype;
  std::vector<float> values(count);
  if (dtype == DType::kU8) {
    const auto* const codes = reinterpret_cast<const uint8_t*>(scales.bytes().data());
    std::transform(codes + first, codes + first + count, values.begin(), e8m0_number);
    return values;
  }
  convert_elements(scales.bytes().data() + first * dtype_size(dtype), dtype,
                   reinterpret_cast<std::byte*>(values.data()), DType::kF32, count);
  return values;
}

bool may_be_scales(DType dtype) {
  return is_float_storage(dtype) || dtype == DType::kU8;
}

/// `what`: "of type e4m3" or "of pairs of E2M1 numbers".
void check_scales(const HfTensor& matrix, const HfTensors& tensors, const MappedTensor& tensor,
                  const BlockScales& blocks, std::string_view what) {
  const std::string file = matrix.file->path().string();
  const std::string quoted = quote_for_message(tensor.name);
  const Shape& shape = tensor.shape;
  require(shape.rank() == 2, "{}: tensor {} {} is {}; only matrices may have block scales", file,
          quoted, what, shape.to_string());
  const HfTensor* scales = find_scales(tensors, tensor.name);
  require(scales != nullptr, "{}: tensor {} is {}, but its scales {}{} are missing", file, quoted,
          what, tensor.name, kSuffix);
  const Shape expected{blocks_of(shape[0], blocks.rows), blocks_of(shape[1], blocks.cols)};
  require(may_be_scales(scales->entry->dtype) && scales->entry->shape == expected,
          "{}: the scales {}{} are {} {}; blocks of {} x {} of {} have f32, bf16, f16 or E8M0 {}",
          scales->file->path().string(), tensor.name, kSuffix, dtype_name(scales->entry->dtype),
          scales->entry->shape.to_string(), blocks.rows, blocks.cols, shape.to_string(),
          expected.to_string());
}

/// Refuses numbers of few bits that nothing says how to read.
void check_scaled(const HfTensor& found, const HfTensors& tensors, const MappedTensor& tensor,
                  const std::optional<BlockScales>& blocks) {
  const bool is_pairs = holds_pairs(*found.entry, tensor.shape);
  const std::string_view what = is_pairs ? "of pairs of E2M1 numbers" : "of type e4m3";
  require(blocks.has_value(),
          "{}: tensor {} is {}, but config.json has no 'quantization_config' that says "
          "how it is scaled",
          found.file->path().string(), quote_for_message(tensor.name), what);
  require(!is_pairs || tensor.shape[1] % kMxfp4Block == 0,
          "{}: tensor {} is {}, whose scales are of {} columns each, and the matrix has {}",
          found.file->path().string(), quote_for_message(tensor.name), what, kMxfp4Block,
          tensor.shape[1]);
  check_scales(found, tensors, tensor, is_pairs ? kPairBlocks : *blocks, what);
}

/// Elements [begin, end), times a scale.
void read_pairs(const uint8_t* codes, int64_t begin, int64_t end, float scale, float* to) {
  for (int64_t at = begin; at < end; ++at)
    to[at - begin] = kE2m1[codes[at / 2] >> (at % 2 == 0 ? 0 : 4) & 15] * scale;
}

void read_e4m3(const uint8_t* codes, int64_t begin, int64_t end, float scale, float* to) {
  for (int64_t at = begin; at < end; ++at) {
    E4m3 number;
    number.bits = codes[at];
    to[at - begin] = static_cast<float>(number) * scale;
  }
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
    if (matrix == nullptr) continue;
    const DType dtype = matrix->entry->dtype;
    if (dtype == DType::kE4M3 || dtype == DType::kU8) names.push_back(name);
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
    require(found.entry->dtype == DType::kE4M3 || holds_pairs(*found.entry, tensor.shape),
            "{}: tensor {} is of type {}; weights must be F32, BF16 or F16, or E4M3 or pairs of "
            "E2M1 numbers with scales",
            found.file->path().string(), quote_for_message(tensor.name),
            dtype_name(found.entry->dtype));
    check_scaled(found, tensors, tensor, blocks);
  }
}

std::optional<ScaledMatrix> find_scaled(const HfTensors& tensors, const MappedTensor& tensor,
                                        const std::optional<BlockScales>& blocks) {
  const HfTensor* found = tensors.find(tensor.name);
  if (found == nullptr) return std::nullopt;
  const bool is_pairs = holds_pairs(*found->entry, tensor.shape);
  if (!is_pairs && found->entry->dtype != DType::kE4M3) return std::nullopt;
  const HfTensor* scales = find_scales(tensors, tensor.name);
  ensure(scales != nullptr && blocks.has_value(), "scales of '{}'", tensor.name);
  return ScaledMatrix{found, scales, is_pairs ? kPairBlocks : *blocks, is_pairs};
}

void read_scaled(const ScaledMatrix& matrix, int64_t begin, std::span<float> to) {
  const int64_t cols = matrix.codes->entry->shape[1] * (matrix.is_pairs ? 2 : 1);
  const auto* const codes = reinterpret_cast<const uint8_t*>(matrix.codes->bytes().data());
  const int64_t width = matrix.blocks.cols;
  const int64_t across = blocks_of(cols, width);
  const int64_t end = begin + std::ssize(to);
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / cols;
    const auto own = read_scales(*matrix.scales, row / matrix.blocks.rows * across, across);
    for (int64_t block = at % cols / width; block < across && at < end; ++block) {
      const int64_t block_end = std::min(row * cols + std::min((block + 1) * width, cols), end);
      float* const target = to.data() + (at - begin);
      matrix.is_pairs ? read_pairs(codes, at, block_end, own[block], target)
                      : read_e4m3(codes, at, block_end, own[block], target);
      at = block_end;
    }
  }
}

}  // namespace tessera
