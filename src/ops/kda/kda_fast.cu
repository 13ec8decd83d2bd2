// For BF16 and heads of 64 and 128: what chunks need of their own keys, in F32 but for its results,
// and the scans of delta_scan.cuh.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_scan.cuh"
#include "ops/gated_delta/delta_squares.cuh"
#include "ops/kda/kda_keys.cuh"

namespace tessera::cuda {
namespace {

static_assert(kSquareThreads == kExactThreads);

union FastShared {
  KeySlices slices;
  struct {  // when those were read
    BFloat16 inverse[kDeltaRows * kSquareStride];
    BFloat16 p[kDeltaRows * kSquareStride];
    float a[kDeltaRows * kMatrixStride];
  };
};

/// The scans' factors of a row: what decays leave is in the keys.
__device__ __forceinline__ void write_factors(DeltaFactors& factors, const KdaPlace<BFloat16>& at) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i >= kDeltaRows) return;
  const bool there = i < at.count();
  const float one = there ? 1 : 0;
  factors.beta[i] = there ? at.beta(i) : 0;
  factors.q_inverse[i] = one;
  factors.k_inverse[i] = one;
  factors.reads[i] = one;
  factors.writes[i] = one;
}

__global__ void __launch_bounds__(kSquareThreads)
    compare_fast_keys(const __grid_constant__ DeltaOperands x, FastKda scratch) {
  __shared__ __align__(16) FastShared shared;
  wait_for_earlier();
  const KdaPlace<BFloat16> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  const FastPlace place{x, at.chunk, at.head};
  KdaPairs<BFloat16> pairs{x, scratch.marks, scratch.sums, at};
  pairs.find(shared.slices);
  pairs.for_each([&](int i, int j, float of_queries, float of_keys) {
    if (scratch.a != nullptr) scratch.a[at.square_at() + i * kDeltaRows + j] = of_keys;
    shared.p[i * kSquareStride + j] = __float2bfloat16_rn(of_queries);
    shared.a[i * kMatrixStride + j] = i < at.count() ? at.beta(i) * of_keys : 0;
  });
  write_factors(scratch.delta.factors[place.task()], at);
  __syncthreads();
  invert(shared.inverse, shared.a);
  __syncthreads();
  write_inverses(scratch.delta, place, shared.inverse, shared.p);
}

void launch_keys(const DeltaOperands& x, const FastKda& scratch, cudaStream_t stream) {
  launch_delta_starts(x, scratch.marks.starts, stream);
  launch_delta_lengths(x, scratch.marks, stream);
  const auto count = static_cast<unsigned>(num_delta_chunks(x.tokens));
  const auto heads = static_cast<unsigned>(x.heads);
  const auto rounded = [](void* data) { return static_cast<BFloat16*>(data); };
  const KdaKeys<BFloat16> keys = {scratch.marks,           scratch.sums,
                                  rounded(scratch.q_kept), rounded(scratch.k_kept),
                                  rounded(scratch.k_rest), scratch.kept};
  launch_early(decay_keys<BFloat16, BFloat16>, {dim3(count, heads), kDecayThreads}, stream, x,
               keys);
  launch_early(compare_fast_keys, {dim3(count, heads), kSquareThreads}, stream, x, scratch);
}

/// Blocks of 64 columns: of 128, three matrices of keys would not fit beside the state.
template <ScanKind kKind>
void launch_scan_of(const DeltaOperands& x, const FastKda& scratch, const void* values,
                    void* results, float* states, cudaStream_t stream) {
  const ScanOperands operands = {.q = scratch.q_kept,
                                 .k = scratch.k_kept,
                                 .values = values,
                                 .results = results,
                                 .states = states,
                                 .k_rest = scratch.k_rest,
                                 .kept = scratch.kept};
  x.key_size == 64 ? launch_scan<64, 64, kKind, true>(x, scratch.delta, operands, stream)
                   : launch_scan<128, 64, kKind, true>(x, scratch.delta, operands, stream);
}

}  // namespace

void launch_fast_kda(const DeltaOperands& x, const FastKda& scratch, void* o, float* states,
                     cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_keys(x, scratch, stream);
  launch_scan_of<ScanKind::kOutputs>(x, scratch, x.v, o, states, stream);
}

void launch_fast_kda_backward(const DeltaOperands& x, const FastKda& scratch,
                              const DeltaGrads& grads, cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_keys(x, scratch, stream);
  launch_scan_of<ScanKind::kKeeps>(x, scratch, x.v, nullptr, nullptr, stream);
  launch_scan_of<ScanKind::kBack>(x, scratch, grads.o, grads.v, nullptr, stream);
  launch_kda_finish(x,
                    {.in_bf16 = true,
                     .marks = scratch.marks,
                     .sums = scratch.sums,
                     .kept = scratch.kept,
                     .p = scratch.p,
                     .a = scratch.a,
                     .written = scratch.delta.written,
                     .of_right = scratch.delta.of_right,
                     .states = scratch.delta.states,
                     .state_grads = scratch.delta.state_grads,
                     .of_q = scratch.of_q,
                     .of_k = scratch.of_k,
                     .of_last = scratch.of_last},
                    grads, stream);
}

}  // namespace tessera::cuda
