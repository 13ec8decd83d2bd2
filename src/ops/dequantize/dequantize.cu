#include "ops/cuda/fp8_cast.cuh"
#include "ops/dequantize/dequantize_kernels.h"

namespace tessera::cuda {
namespace {

/// All of a vector's elements have one scale.
template <typename T, int kWidth, bool kE4m3>
struct DequantizeMap {
  static constexpr int kUnroll = 4;
  static constexpr int kBlocks = 4;
  struct Loaded {
    Pack<uint8_t, kWidth> codes;
    float scale;
  };

  const uint8_t* x;
  const float* scales;
  T* y;
  int64_t num_columns;
  Divider vectors_of_scale;
  int64_t scales_of_row;
  Divider rows_of_scale;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return {load_pack<kWidth>(x + row * num_columns + int64_t{vector} * kWidth),
            scales[rows_of_scale.quotient(static_cast<uint32_t>(row)) * scales_of_row +
                   vectors_of_scale.quotient(vector)]};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    cuda::store(y + row * num_columns + int64_t{vector} * kWidth,
                from_fp8<kE4m3>(loaded.codes, loaded.scale));
  }
};

template <typename T, int kWidth, bool kE4m3>
void launch_as(const CodedRows& coded, cudaStream_t stream) {
  const int64_t scales_of_row = divide_up(coded.num_columns, coded.columns_of_scale);
  launch_map(
      DequantizeMap<T, kWidth, kE4m3>{
          coded.x, coded.scales, static_cast<T*>(coded.y), coded.num_columns,
          Divider(static_cast<uint32_t>(divide_up(coded.columns_of_scale, int64_t{kWidth}))),
          scales_of_row, Divider(static_cast<uint32_t>(coded.rows_of_scale))},
      coded.rows, coded.num_columns / kWidth, stream);
}

template <typename T, bool kE4m3>
void launch_of(const CodedRows& coded, cudaStream_t stream) {
  constexpr int kWide = 8;
  const bool whole = coded.num_columns % kWide == 0 && coded.columns_of_scale % kWide == 0 &&
                     are_aligned(coded.x, coded.y);
  whole ? launch_as<T, kWide, kE4m3>(coded, stream) : launch_as<T, 1, kE4m3>(coded, stream);
}

}  // namespace

void launch_dequantize(const CodedRows& coded, cudaStream_t stream) {
  with_type(coded.dtype, [&]<typename T>() {
    coded.element == DType::kE4M3 ? launch_of<T, true>(coded, stream)
                                  : launch_of<T, false>(coded, stream);
  });
}

}  // namespace tessera::cuda
