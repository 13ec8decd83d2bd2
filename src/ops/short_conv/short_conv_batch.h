#pragma once

#include "ops/operator.h"
#include "ops/short_conv/short_conv.h"

namespace tessera {

/// ShortConvCached of several sequences' tokens: those of sequence s, rows cu_seqlens[s] to
/// cu_seqlens[s + 1], are the last of its lengths[s] tokens, and the K before them are in slot
/// slots[s]. (x A [T,C], w F32 [C,K], cu_seqlens I32 [S+1], lengths I32 [S], slots I32 [S], where
/// `biased` the bias F32 [C]) -> (y A [T,C], the last inputs of all slots A [slots·K, C]). What a
/// slot held is not read of a sequence that begins; one without rows, whose slot may be another's,
/// has no effect; y of rows behind the last sequence's is 0. A token's bits do not depend on how
/// its sequence is cut. No gradient.
class ShortConvBatch final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv_batch";
  enum Input : int { kX, kWeight, kCuSeqlens, kLengths, kSlots, kBias };
  enum Output : int { kY, kState };
  explicit ShortConvBatch(int64_t num_slots, const ShortConvSpec& spec = {})
      : num_slots_(num_slots), spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kState; }
  bool recomputable() const override { return false; }
  int64_t num_slots() const { return num_slots_; }
  bool biased() const { return spec_.biased; }
  bool silu() const { return spec_.silu; }

 private:
  int64_t num_slots_;
  ShortConvSpec spec_;
};

OperatorPtr make_short_conv_batch(int64_t num_slots, const ShortConvSpec& spec = {});
void add_short_conv_batch_cpu(KernelTable& table);
void add_short_conv_batch_cuda(KernelTable& table);

}  // namespace tessera
