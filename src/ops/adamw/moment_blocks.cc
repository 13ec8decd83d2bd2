#include "ops/adamw/moment_blocks.h"

#include <algorithm>

#include "ops/adamw/moment_code.h"

namespace tessera {
namespace {

void check_moments(const CodedMoments& coded, const Tensor& values) {
  const Shape& shape = values.shape;
  ensure(has_scales(coded.kind) && values.dtype == DType::kF32 && shape.rank() == 2 &&
             coded.codes.shape == shape && coded.codes.dtype == moment_dtype(coded.kind) &&
             coded.scales.dtype == DType::kU8 && coded.scales.shape[0] == shape[0],
         "moments {} kept as {} {} with scales {}", shape.to_string(),
         dtype_name(coded.codes.dtype), coded.codes.shape.to_string(),
         coded.scales.shape.to_string());
}

template <typename Run>
void with_code(const CodedMoments& coded, const Run& run) {
  coded.moment == Moment::kFirst ? with_first_moment_code(coded.kind, run)
                                 : with_second_moment_code(coded.kind, run);
}

/// Calls visit(scale, first element, end) for each block, by their places in the flat tensors.
template <typename Visit>
void for_each_block(const CodedMoments& coded, const Visit& visit) {
  const int64_t columns = coded.codes.shape[1];
  const int64_t first_block = coded.first_column / kMomentBlock;
  for (int64_t row = 0; row < coded.codes.shape[0]; ++row) {
    for (int64_t i = 0; i < coded.scales.shape[1]; ++i) {
      const int64_t begin = (first_block + i) * kMomentBlock - coded.first_column;
      visit(row * coded.scales.shape[1] + i, row * columns + std::max<int64_t>(begin, 0),
            row * columns + std::min(begin + kMomentBlock, columns));
    }
  }
}

}  // namespace

bool names_scales(std::string_view state) {
  return state.ends_with(".m_scale") || state.ends_with(".v_scale");
}

Shape shape_of_scales(const Shape& moments) {
  ensure(moments.rank() == 2, "scales of moments {}", moments.to_string());
  return {moments[0], count_moment_blocks(moments[1])};
}

Slice slice_of_scales(const Slice& moments) {
  Slice scales = moments;
  scales.global = shape_of_scales(moments.global);
  const int64_t first = moments.columns.begin / kMomentBlock;
  const int64_t end =
      moments.columns.count == 0 ? first : count_moment_blocks(moments.columns.end());
  scales.columns = {first, end - first};
  return scales;
}

bool has_whole_blocks(const Slice& moments) {
  const auto is_border = [&](int64_t column) {
    return column % kMomentBlock == 0 || column == moments.global[1];
  };
  return is_border(moments.columns.begin) && is_border(moments.columns.end());
}

void decode_moments(const CodedMoments& from, const Tensor& to) {
  check_moments(from, to);
  const uint8_t* const scales = from.scales.as<uint8_t>();
  float* const values = to.as<float>();
  with_code(from, [&]<typename Code>() {
    const auto* const codes = static_cast<const typename Code::Code*>(from.codes.data);
    for_each_block(from, [&](int64_t scale, int64_t first, int64_t end) {
      const uint32_t base = Code::base_of(scales[scale]);
      for (int64_t i = first; i < end; ++i) values[i] = Code::decode(codes[i], base);
    });
  });
}

void encode_moments(const Tensor& from, const CodedMoments& to) {
  check_moments(to, from);
  uint8_t* const scales = to.scales.as<uint8_t>();
  const float* const values = from.as<float>();
  with_code(to, [&]<typename Code>() {
    auto* const codes = static_cast<typename Code::Code*>(to.codes.data);
    for_each_block(to, [&](int64_t scale, int64_t first, int64_t end) {
      uint32_t largest = 0;
      for (int64_t i = first; i < end; ++i)
        largest = std::max(largest, word_of_float(values[i]) & 0x7fffffffU);
      scales[scale] = Code::scale_of(largest);
      const uint32_t base = Code::base_of(scales[scale]);
      for (int64_t i = first; i < end; ++i) codes[i] = Code::encode_nearest(values[i], base);
    });
  });
}

}  // namespace tessera
