// A group of lanes holds a row in registers, one vector in each: lanes of a warp for short rows
// (heads), a block for long ones. Rows that do not fit a block are read twice.
#include "ops/rmsnorm/rmsnorm_kernels.h"

#include <algorithm>

#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kHeadThreads = 256;  // of a block whose warps hold several rows each
constexpr int kRowThreads = 256;   // that hold a row of most models
constexpr int kWideThreads = 512;  // of a block that reads its rows twice
constexpr int kForwardRows = 4;    // that a group holds at a time
constexpr int kBackwardRows = 2;
constexpr int kBlock = 0;  // lanes of a group that is a whole block

/// Sums over groups of lanes, of kRows values at a time; the same bits in all lanes of a group.
template <int kLanes, int kRows>
struct GroupSum {
  __device__ void operator()(float (&values)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r] = sum_lanes<kLanes>(values[r]);
  }
};

/// By warps, whose sums are then added in order. Two buffers, so that one barrier is enough.
template <int kRows>
struct GroupSum<kBlock, kRows> {
  struct alignas(4 * kRows) Sums {
    float of[kRows];
  };
  Sums (*buffers)[32];
  int turn = 0;

  __device__ GroupSum() {
    __shared__ Sums shared[2][32];
    buffers = shared;
  }
  __device__ void operator()(float (&values)[kRows]) {
    Sums* warps = buffers[turn];
    turn ^= 1;
    Sums own;
#pragma unroll
    for (int r = 0; r < kRows; ++r) own.of[r] = sum_lanes(values[r]);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r] = 0;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
      const Sums sums = warps[warp];
#pragma unroll
      for (int r = 0; r < kRows; ++r) values[r] += sums.of[r];
    }
  }
};

/// Which rows and which vector of them a thread holds.
template <int kLanes>
struct Lane {
  int lanes;
  int group;
  int num_groups;
  int column;

  __device__ explicit Lane(int kWidth) {
    lanes = kLanes == kBlock ? static_cast<int>(blockDim.x) : kLanes;
    group = static_cast<int>(threadIdx.x) / lanes;
    num_groups = static_cast<int>(blockDim.x) / lanes;
    column = (static_cast<int>(threadIdx.x) % lanes) * kWidth;
  }
};

struct ForwardParams {
  const void* x;
  const float* weight;
  void* y;
  float* rstd;
  RowCount rows;
  int hidden;
  float eps;
};

template <typename T, int kWidth, int kLanes>
__global__ void __launch_bounds__(kLanes == kBlock ? kMaxThreads : kHeadThreads)
    rmsnorm_rows(const __grid_constant__ ForwardParams p) {
  constexpr int kRows = kForwardRows;
  const Lane<kLanes> lane(kWidth);
  const bool holds = lane.column < p.hidden;
  const T* x = static_cast<const T*>(p.x) + lane.column;
  T* y = static_cast<T*>(p.y) + lane.column;
  const int64_t num_rows = p.rows.in_use();
  const int64_t step = static_cast<int64_t>(gridDim.x) * lane.num_groups * kRows;
  const float scale = 1.0F / static_cast<float>(p.hidden);
  Floats<kWidth> weight = {};
  if (holds) weight = load<kWidth>(p.weight + lane.column);
  GroupSum<kLanes, kRows> sum_group;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * lane.num_groups * kRows; first < num_rows;
       first += step) {
    const int64_t row = first + lane.group * kRows;
    Pack<T, kWidth> values[kRows];
    float sums[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (holds && row + r < num_rows) values[r] = load_pack<kWidth>(x + (row + r) * p.hidden);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
      const Floats<kWidth> v = to_floats(values[r]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[r] += v[i] * v[i];
    }
    sum_group(sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
      const float rstd = 1.0F / sqrtf(sums[r] * scale + p.eps);
      if (lane.column == 0) p.rstd[row + r] = rstd;
      Floats<kWidth> v = to_floats(values[r]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = v[i] * rstd * weight[i];
      store(y + (row + r) * p.hidden, v);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWideThreads)
    rmsnorm_wide_rows(const __grid_constant__ ForwardParams p) {
  const int64_t num_rows = p.rows.in_use();
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  constexpr int kStep = kWideThreads * kWidth;
  GroupSum<kBlock, 1> sum_group;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + row * p.hidden;
    T* y = static_cast<T*>(p.y) + row * p.hidden;
    float sums[1] = {};
#pragma unroll 4
    for (int column = first; column < p.hidden; column += kStep) {
      const Floats<kWidth> v = load<kWidth>(x + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[0] += v[i] * v[i];
    }
    sum_group(sums);
    const float rstd = 1.0F / sqrtf(sums[0] / static_cast<float>(p.hidden) + p.eps);
    if (threadIdx.x == 0) p.rstd[row] = rstd;
#pragma unroll 4
    for (int column = first; column < p.hidden; column += kStep) {
      Floats<kWidth> v = load<kWidth>(x + column);
      const Floats<kWidth> weight = load<kWidth>(p.weight + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = v[i] * rstd * weight[i];
      store(y + column, v);
    }
  }
}

/// With n = x · rstd and g = grad · weight: grad of x = rstd · (g - n · mean(g · n)), and the
/// weight's gradient is the sum of grad · n over rows. The addend is added to the gradient of x.
struct BackwardParams {
  const void* x;
  const float* weight;
  const float* rstd;
  const void* grad;
  const void* addend;  ///< or null
  void* grad_x;
  float* partials;  ///< [blocks, hidden]
  RowCount rows;
  int hidden;
};

/// Blocks of a multiprocessor: registers for the rows that a thread holds decide.
constexpr int backward_blocks(int threads) {
  return threads == kMaxThreads ? 1 : 768 / threads;
}

template <typename T, int kWidth, int kLanes, int kThreads, bool kAddend>
__global__ void __launch_bounds__(kThreads, backward_blocks(kThreads))
    rmsnorm_backward_rows(const __grid_constant__ BackwardParams p) {
  constexpr int kRows = kBackwardRows;
  extern __shared__ float shared[];
  const Lane<kLanes> lane(kWidth);
  const bool holds = lane.column < p.hidden;
  const T* x = static_cast<const T*>(p.x) + lane.column;
  const T* grad = static_cast<const T*>(p.grad) + lane.column;
  const T* addend = static_cast<const T*>(p.addend) + lane.column;
  T* grad_x = static_cast<T*>(p.grad_x) + lane.column;
  const int64_t num_rows = p.rows.in_use();
  const int64_t step = static_cast<int64_t>(gridDim.x) * lane.num_groups * kRows;
  const float scale = 1.0F / static_cast<float>(p.hidden);
  Floats<kWidth> weight = {};
  Floats<kWidth> weight_grads = {};
  if (holds) weight = load<kWidth>(p.weight + lane.column);
  GroupSum<kLanes, kRows> sum_group;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * lane.num_groups * kRows; first < num_rows;
       first += step) {
    const int64_t row = first + lane.group * kRows;
    Pack<T, kWidth> values[kRows];
    Pack<T, kWidth> grads[kRows];
    Pack<T, kWidth> addends[kAddend ? kRows : 1];
    float rstd[kRows];
    float dots[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
      values[r] = load_pack<kWidth>(x + (row + r) * p.hidden);
      grads[r] = load_pack<kWidth>(grad + (row + r) * p.hidden);
      if constexpr (kAddend) addends[r] = load_pack<kWidth>(addend + (row + r) * p.hidden);
      rstd[r] = p.rstd[row + r];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
      const Floats<kWidth> v = to_floats(values[r]);
      const Floats<kWidth> g = to_floats(grads[r]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float term = g[i] * (v[i] * rstd[r]);
        weight_grads[i] += term;
        dots[r] += term * weight[i];
      }
    }
    sum_group(dots);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
      const float mean = dots[r] * scale;
      const Floats<kWidth> v = to_floats(values[r]);
      Floats<kWidth> g = to_floats(grads[r]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) g[i] = rstd[r] * (g[i] * weight[i] - v[i] * rstd[r] * mean);
      if constexpr (kAddend) {
        const Floats<kWidth> other = to_floats(addends[r]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) g[i] += other[i];
      }
      store(grad_x + (row + r) * p.hidden, g);
    }
  }
  if (p.partials != nullptr)
    write_block_sums(p.partials + static_cast<int64_t>(blockIdx.x) * p.hidden, p.hidden,
                     weight_grads, lane.lanes, shared);
}

// The weight's gradients are summed in the block's own partials, which it visits once for each row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWideThreads)
    rmsnorm_backward_wide_rows(const __grid_constant__ BackwardParams p) {
  const int64_t num_rows = p.rows.in_use();
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  constexpr int kStep = kWideThreads * kWidth;
  float* weight_grads =
      p.partials == nullptr ? nullptr : p.partials + static_cast<int64_t>(blockIdx.x) * p.hidden;
  if (weight_grads != nullptr) {
    for (int column = first; column < p.hidden; column += kStep)
      store(weight_grads + column, Floats<kWidth>{});
  }
  GroupSum<kBlock, 1> sum_group;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + row * p.hidden;
    const T* grad = static_cast<const T*>(p.grad) + row * p.hidden;
    const T* addend =
        p.addend == nullptr ? nullptr : static_cast<const T*>(p.addend) + row * p.hidden;
    T* grad_x = static_cast<T*>(p.grad_x) + row * p.hidden;
    const float rstd = p.rstd[row];
    float dots[1] = {};
    for (int column = first; column < p.hidden; column += kStep) {
      Floats<kWidth> term = load<kWidth>(x + column);
      const Floats<kWidth> g = load<kWidth>(grad + column);
      const Floats<kWidth> weight = load<kWidth>(p.weight + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        term[i] = g[i] * (term[i] * rstd);
        dots[0] += term[i] * weight[i];
      }
      if (weight_grads == nullptr) continue;
      const Floats<kWidth> before = load<kWidth>(weight_grads + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) term[i] += before[i];
      store(weight_grads + column, term);
    }
    sum_group(dots);
    const float mean = dots[0] / static_cast<float>(p.hidden);
    for (int column = first; column < p.hidden; column += kStep) {
      const Floats<kWidth> v = load<kWidth>(x + column);
      Floats<kWidth> g = load<kWidth>(grad + column);
      const Floats<kWidth> weight = load<kWidth>(p.weight + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) g[i] = rstd * (g[i] * weight[i] - v[i] * rstd * mean);
      if (addend != nullptr) {
        const Floats<kWidth> other = load<kWidth>(addend + column);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) g[i] += other[i];
      }
      store(grad_x + column, g);
    }
  }
}

/// The shape of a launch for rows of `vectors` vectors.
struct Grid {
  int threads;
  int groups;  ///< rows that a block's threads hold side by side
  int blocks;

  Grid(int64_t rows, int64_t vectors, int lanes, int group_rows, int resident_threads,
       int max_blocks) {
    threads = lanes == kBlock ? static_cast<int>(divide_up(vectors, 32)) * 32 : kHeadThreads;
    groups = lanes == kBlock ? 1 : threads / lanes;
    const int64_t resident = std::max(resident_threads / threads, 1);
    blocks = static_cast<int>(
        std::min({divide_up(rows, int64_t{groups} * group_rows), resident, int64_t{max_blocks}}));
  }
};

/// Calls run.operator()<kLanes>() with the lanes that hold a row of `vectors` vectors.
template <typename Run>
void with_lanes(int64_t vectors, Run run) {
  if (vectors <= 16) {
    run.template operator()<16>();
  } else if (vectors <= 32) {
    run.template operator()<32>();
  } else {
    run.template operator()<kBlock>();
  }
}

template <typename T, int kWidth>
void launch_forward(const ForwardParams& params, int num_sms, cudaStream_t stream) {
  const int64_t vectors = params.hidden / kWidth;
  const int64_t rows = params.rows.bound;
  if (vectors > kMaxThreads) {
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, 4 * num_sms));
    rmsnorm_wide_rows<T, kWidth><<<blocks, kWideThreads, 0, stream>>>(params);
    return;
  }
  with_lanes(vectors, [&]<int kLanes>() {
    const Grid grid(rows, vectors, kLanes, kForwardRows, 2048 * num_sms, 32 * num_sms);
    rmsnorm_rows<T, kWidth, kLanes>
        <<<static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.threads), 0, stream>>>(
            params);
  });
}

/// Returns the number of blocks, each of which has written its partial sums.
template <typename T, int kWidth>
int launch_backward(const BackwardParams& params, int num_sms, cudaStream_t stream) {
  const int64_t vectors = params.hidden / kWidth;
  const int64_t rows = params.rows.bound;
  if (vectors > kMaxThreads) {
    const auto blocks =
        static_cast<int>(std::min<int64_t>({rows, 4 * num_sms, kMaxColumnPartials}));
    rmsnorm_backward_wide_rows<T, kWidth>
        <<<static_cast<unsigned>(blocks), kWideThreads, 0, stream>>>(params);
    return blocks;
  }
  int blocks = 0;
  const auto launch = [&]<int kLanes, int kThreads>() {
    const Grid grid(rows, vectors, kLanes, kBackwardRows,
                    backward_blocks(kThreads) * kThreads * num_sms, kMaxColumnPartials);
    const size_t shared_bytes = sizeof(float) * static_cast<size_t>(grid.threads * kWidth);
    const auto kernel = params.addend == nullptr
                            ? rmsnorm_backward_rows<T, kWidth, kLanes, kThreads, false>
                            : rmsnorm_backward_rows<T, kWidth, kLanes, kThreads, true>;
    kernel<<<static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.threads), shared_bytes,
             stream>>>(params);
    blocks = grid.blocks;
  };
  with_lanes(vectors, [&]<int kLanes>() {
    if constexpr (kLanes != kBlock) {
      launch.template operator()<kLanes, kHeadThreads>();
    } else if (vectors <= kRowThreads) {
      launch.template operator()<kBlock, kRowThreads>();
    } else {
      launch.template operator()<kBlock, kMaxThreads>();
    }
  });
  return blocks;
}

}  // namespace

void launch_rmsnorm(const RmsNormRows& call, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.hidden) && are_aligned(call.x, call.weight, call.y);
  const ForwardParams params = {.x = call.x,
                                .weight = call.weight,
                                .y = call.y,
                                .rstd = call.rstd,
                                .rows = call.rows,
                                .hidden = static_cast<int>(call.hidden),
                                .eps = call.eps};
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_forward<T, kWidth>(params, call.num_sms, stream);
  });
  check(cudaGetLastError());
}

void launch_rmsnorm_backward(const RmsNormBackwardRows& call, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.hidden) &&
                       are_aligned(call.x, call.weight, call.grad, call.addend, call.grad_x);
  const BackwardParams params = {.x = call.x,
                                 .weight = call.weight,
                                 .rstd = call.rstd,
                                 .grad = call.grad,
                                 .addend = call.addend,
                                 .grad_x = call.grad_x,
                                 .partials = call.grad_weight == nullptr ? nullptr : call.partials,
                                 .rows = call.rows,
                                 .hidden = static_cast<int>(call.hidden)};
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    const int blocks = launch_backward<T, kWidth>(params, call.num_sms, stream);
    check(cudaGetLastError());
    if (call.grad_weight != nullptr)
      launch_add_partials(call.grad_weight, call.partials, blocks, call.hidden, stream);
  });
}

}  // namespace tessera::cuda
