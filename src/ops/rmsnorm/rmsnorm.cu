// A group of lanes holds a row in registers, one vector in each: lanes of a warp for short rows
// (heads), a block for long ones. Rows that do not fit a block are read twice.
#include "ops/rmsnorm/rmsnorm_kernels.h"

#include <algorithm>

#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kHeadThreads = 256;  // of a block whose warps hold several rows each
constexpr int kWideThreads = 512;  // of a block that reads its rows twice
constexpr int kBlock = 0;          // lanes of a group that is a whole block

/// Rows that a group of the forward pass holds.
template <int kLanes>
constexpr int kForwardRows = kLanes == kBlock ? 2 : 4;

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
  int lanes = kLanes;
  int group = static_cast<int>(threadIdx.x) / kLanes;
  int num_groups = static_cast<int>(blockDim.x) / kLanes;
  int column;

  __device__ explicit Lane(int width) : column(static_cast<int>(threadIdx.x) % kLanes * width) {}
};
template <>
struct Lane<kBlock> {
  int lanes = static_cast<int>(blockDim.x);
  int group = 0;
  int num_groups = 1;
  int column;

  __device__ explicit Lane(int width) : column(static_cast<int>(threadIdx.x) * width) {}
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

/// Blocks of an SM for whose registers there must be room.
constexpr int forward_blocks(int lanes, int threads) {
  return threads > kHeadThreads ? 1 : lanes == kBlock ? 6 : 4;
}

template <typename T, int kWidth, int kLanes, int kThreads>
__global__ void __launch_bounds__(kThreads, forward_blocks(kLanes, kThreads))
    rmsnorm_rows(const __grid_constant__ ForwardParams p) {
  wait_for_earlier();
  let_next_begin_if_short();
  constexpr int kRows = kForwardRows<kLanes>;
  const Lane<kLanes> lane(kWidth);
  const bool holds = lane.column < p.hidden;
  const int64_t num_rows = p.rows.in_use();
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * lane.num_groups + lane.group) * kRows;
  const T* x = static_cast<const T*>(p.x) + row * p.hidden + lane.column;
  T* y = static_cast<T*>(p.y) + row * p.hidden + lane.column;
  Pack<T, kWidth> values[kRows];
  float sums[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (holds && row + r < num_rows) values[r] = load_pack_once<kWidth>(x + r * p.hidden);
  Floats<kWidth> weight = {};
  if (holds) weight = load<kWidth>(p.weight + lane.column);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!holds || row + r >= num_rows) continue;
    const Floats<kWidth> v = to_floats(values[r]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[r] += v[i] * v[i];
  }
  GroupSum<kLanes, kRows>()(sums);
  const float scale = 1.0F / static_cast<float>(p.hidden);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!holds || row + r >= num_rows) continue;
    const float rstd = 1.0F / sqrtf(sums[r] * scale + p.eps);  // as on the CPU
    if (lane.column == 0) p.rstd[row + r] = rstd;
    Floats<kWidth> v = to_floats(values[r]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = v[i] * rstd * weight[i];
    store_once(y + r * p.hidden, v);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWideThreads)
    rmsnorm_wide_rows(const __grid_constant__ ForwardParams p) {
  wait_for_earlier();
  let_next_begin_if_short();
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

/// How the backward kernel for groups of kLanes lanes and blocks of up to kThreads threads is cut:
/// the rows that a group takes at a time, the stages of its ring of such rows, of which all but one
/// are under way, and the blocks of an SM, for which there must be registers.
template <int kLanes, int kThreads>
struct BackwardCut {
  static constexpr bool kWide = kThreads > kHeadThreads;
  static constexpr int kRows = kWide ? 1 : kLanes == kBlock ? 4 : 2;
  static constexpr int kStages = kWide ? 3 : 2;
  static constexpr int kBlocks = kWide ? 1024 / kThreads : kLanes == kBlock ? 2 : 3;
};

template <typename T, int kWidth, int kLanes, int kThreads, bool kAddend>
__global__ void __launch_bounds__(kThreads, BackwardCut<kLanes, kThreads>::kBlocks)
    rmsnorm_backward_rows(const __grid_constant__ BackwardParams p) {
  wait_for_earlier();
  using Vector = Pack<T, kWidth>;
  using Cut = BackwardCut<kLanes, kThreads>;
  constexpr int kRows = Cut::kRows;
  constexpr int kOperands = kAddend ? 3 : 2;
  extern __shared__ __align__(16) unsigned char memory[];
  const Lane<kLanes> lane(kWidth);
  const bool holds = lane.column < p.hidden;
  const T* operands[] = {static_cast<const T*>(p.x) + lane.column,
                         static_cast<const T*>(p.grad) + lane.column,
                         static_cast<const T*>(p.addend) + lane.column};
  T* grad_x = static_cast<T*>(p.grad_x) + lane.column;
  const int64_t num_rows = p.rows.in_use();
  const int64_t step = static_cast<int64_t>(gridDim.x) * lane.num_groups * kRows;
  const float scale = 1.0F / static_cast<float>(p.hidden);
  // A thread's own vectors: [stages, rows, operands], blockDim.x apart.
  Vector* own = reinterpret_cast<Vector*>(memory) + threadIdx.x;
  const auto slot = [&](int stage, int r, int operand) {
    return own + ((stage * kRows + r) * kOperands + operand) * static_cast<int>(blockDim.x);
  };
  const auto fetch = [&](int64_t row, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
#pragma unroll
      for (int i = 0; i < kOperands; ++i)
        copy_async(slot(stage, r, i),
                   reinterpret_cast<const Vector*>(operands[i] + (row + r) * p.hidden));
    }
    commit_copies();
  };
  int64_t first = static_cast<int64_t>(blockIdx.x) * lane.num_groups * kRows;
#pragma unroll
  for (int stage = 0; stage < Cut::kStages - 1; ++stage)
    fetch(first + lane.group * kRows + stage * step, stage);
  let_next_begin();
  Floats<kWidth> weight = {};
  Floats<kWidth> weight_grads = {};
  if (holds) weight = load<kWidth>(p.weight + lane.column);
  GroupSum<kLanes, kRows> sum_group;
  int stage = 0;
  for (; first < num_rows; first += step) {
    const int64_t row = first + lane.group * kRows;
    float rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rstd[r] = row + r < num_rows ? p.rstd[row + r] : 0.0F;
    wait_copies<Cut::kStages - 2>();
    Vector held[kRows][kOperands];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kOperands; ++i) held[r][i] = *slot(stage, r, i);
    fetch(row + (Cut::kStages - 1) * step, stage == 0 ? Cut::kStages - 1 : stage - 1);
    stage = stage + 1 == Cut::kStages ? 0 : stage + 1;
    float dots[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!holds || row + r >= num_rows) continue;
      const Floats<kWidth> v = to_floats(held[r][0]);
      const Floats<kWidth> g = to_floats(held[r][1]);
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
      const Floats<kWidth> v = to_floats(held[r][0]);
      Floats<kWidth> g = to_floats(held[r][1]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) g[i] = rstd[r] * (g[i] * weight[i] - v[i] * rstd[r] * mean);
      if constexpr (kAddend) {
        const Floats<kWidth> other = to_floats(held[r][2]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) g[i] += other[i];
      }
      store(grad_x + (row + r) * p.hidden, g);
    }
  }
  if (p.partials == nullptr) return;
  wait_copies<0>();
  write_block_sums(p.partials + static_cast<int64_t>(blockIdx.x) * p.hidden, p.hidden, weight_grads,
                   lane.lanes, reinterpret_cast<float*>(memory));
}

// The weight's gradients are summed in the block's own partials, which it visits once for each row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWideThreads)
    rmsnorm_backward_wide_rows(const __grid_constant__ BackwardParams p) {
  wait_for_earlier();
  let_next_begin_if_short();
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

/// The blocks of a launch for rows of `vectors` vectors.
struct Blocks {
  int threads;
  int groups;  ///< that hold rows side by side

  Blocks(int64_t vectors, int lanes) {
    threads = lanes == kBlock ? static_cast<int>(divide_up(vectors, 32)) * 32 : kHeadThreads;
    groups = lanes == kBlock ? 1 : threads / lanes;
  }
  /// How many take all rows, `group_rows` of them in each group.
  int64_t count(int64_t rows, int group_rows) const {
    return divide_up(rows, int64_t{groups} * group_rows);
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
    launch_early(rmsnorm_wide_rows<T, kWidth>, {blocks, kWideThreads}, stream, params);
    return;
  }
  const auto launch = [&]<int kLanes, int kThreads>() {
    const Blocks blocks(vectors, kLanes);
    const LaunchShape shape = {static_cast<unsigned>(blocks.count(rows, kForwardRows<kLanes>)),
                               static_cast<unsigned>(blocks.threads)};
    launch_early(rmsnorm_rows<T, kWidth, kLanes, kThreads>, shape, stream, params);
  };
  with_lanes(vectors, [&]<int kLanes>() {
    if constexpr (kLanes != kBlock) {
      launch.template operator()<kLanes, kHeadThreads>();
    } else if (vectors <= kHeadThreads) {
      launch.template operator()<kBlock, kHeadThreads>();
    } else {
      launch.template operator()<kBlock, kMaxThreads>();
    }
  });
}

template <typename T, int kWidth, int kLanes, int kThreads>
int launch_backward_rows(const BackwardParams& params, int num_sms, cudaStream_t stream) {
  using Cut = BackwardCut<kLanes, kThreads>;
  const Blocks blocks(params.hidden / kWidth, kLanes);
  const int64_t resident = std::max(Cut::kBlocks * kThreads / blocks.threads, 1) * num_sms;
  const int64_t count = std::min(
      {blocks.count(params.rows.bound, Cut::kRows), resident, int64_t{kMaxColumnPartials}});
  const int operands = params.addend == nullptr ? 2 : 3;
  const int ring = Cut::kStages * Cut::kRows * operands * static_cast<int>(sizeof(Pack<T, kWidth>));
  const int shared_bytes =
      blocks.threads * std::max(ring, kWidth * static_cast<int>(sizeof(float)));
  const auto kernel = params.addend == nullptr
                          ? rmsnorm_backward_rows<T, kWidth, kLanes, kThreads, false>
                          : rmsnorm_backward_rows<T, kWidth, kLanes, kThreads, true>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  const LaunchShape shape = {static_cast<unsigned>(count), static_cast<unsigned>(blocks.threads),
                             static_cast<size_t>(shared_bytes)};
  launch_early(kernel, shape, stream, params);
  return static_cast<int>(count);
}

/// Returns the number of blocks, each of which has written its partial sums.
template <typename T, int kWidth>
int launch_backward(const BackwardParams& params, int num_sms, cudaStream_t stream) {
  const int64_t vectors = params.hidden / kWidth;
  const int64_t rows = params.rows.bound;
  if (vectors > kMaxThreads) {
    const auto blocks =
        static_cast<int>(std::min<int64_t>({rows, 4 * num_sms, kMaxColumnPartials}));
    launch_early(rmsnorm_backward_wide_rows<T, kWidth>,
                 {static_cast<unsigned>(blocks), kWideThreads}, stream, params);
    return blocks;
  }
  int num_blocks = 0;
  with_lanes(vectors, [&]<int kLanes>() {
    if constexpr (kLanes != kBlock) {
      num_blocks = launch_backward_rows<T, kWidth, kLanes, kHeadThreads>(params, num_sms, stream);
    } else if (vectors <= kHeadThreads) {
      num_blocks = launch_backward_rows<T, kWidth, kBlock, kHeadThreads>(params, num_sms, stream);
    } else if (vectors <= kMaxThreads / 2) {
      num_blocks =
          launch_backward_rows<T, kWidth, kBlock, kMaxThreads / 2>(params, num_sms, stream);
    } else {
      num_blocks = launch_backward_rows<T, kWidth, kBlock, kMaxThreads>(params, num_sms, stream);
    }
  });
  return num_blocks;
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
}

void launch_rmsnorm_backward(const RmsNormBackwardRows& call, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.hidden) &&
                       are_aligned(call.x, call.weight, call.grad, call.addend, call.grad_x);
  const BackwardParams params = {
      .x = call.x,
      .weight = call.weight,
      .rstd = call.rstd,
      .grad = call.grad,
      .addend = call.addend,
      .grad_x = call.grad_x,
      .partials = call.grad_weight.sums == nullptr ? nullptr : call.partials,
      .rows = call.rows,
      .hidden = static_cast<int>(call.hidden)};
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    const int blocks = launch_backward<T, kWidth>(params, call.num_sms, stream);
    if (call.grad_weight.sums != nullptr)
      launch_add_partials(call.grad_weight, call.partials, blocks, call.hidden, stream);
  });
}

}  // namespace tessera::cuda
