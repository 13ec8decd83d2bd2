// The scans of the gated delta rule: launches.
#include "ops/gated_delta/delta_scan.cuh"

namespace tessera::cuda {
namespace {

/// Columns of a block: the fewer tasks there are, the more blocks share each.
int choose_columns(const DeltaOperands& x, int num_sms) {
  const int64_t tasks = static_cast<int64_t>(x.heads) * std::max(x.num_sequences, 1);
  return x.value_size == 128 && tasks * 4 >= 3 * int64_t{num_sms} ? 128 : 64;
}

template <ScanKind kKind>
void launch_scan(const DeltaOperands& x, const FastDelta& scratch, const ScanOperands& operands,
                 int num_sms, cudaStream_t stream) {
  const bool is_wide = choose_columns(x, num_sms) == 128;
  if (x.key_size == 64) {
    is_wide ? launch_scan<64, 128, kKind, false>(x, scratch, operands, stream)
            : launch_scan<64, 64, kKind, false>(x, scratch, operands, stream);
  } else {
    is_wide ? launch_scan<128, 128, kKind, false>(x, scratch, operands, stream)
            : launch_scan<128, 64, kKind, false>(x, scratch, operands, stream);
  }
}

}  // namespace

void launch_fast_delta(const DeltaOperands& x, const FastDelta& scratch,
                       const FastDeltaForward& forward, cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_fast_delta_chunks(x, scratch, stream);
  launch_scan<ScanKind::kOutputs>(
      x, scratch,
      {.q = x.q, .k = x.k, .values = x.v, .results = forward.o, .states = forward.states},
      forward.num_sms, stream);
}

void launch_fast_delta_backward(const DeltaOperands& x, const FastDelta& scratch,
                                const DeltaGrads& grads, int num_sms, cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_fast_delta_chunks(x, scratch, stream);
  launch_scan<ScanKind::kKeeps>(
      x, scratch, {.q = x.q, .k = x.k, .values = x.v, .results = nullptr, .states = nullptr},
      num_sms, stream);
  launch_scan<ScanKind::kBack>(
      x, scratch, {.q = x.q, .k = x.k, .values = grads.o, .results = grads.v, .states = nullptr},
      num_sms, stream);
  launch_fast_delta_finish(x, scratch, grads, num_sms, stream);
}

}  // namespace tessera::cuda
