#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "ops/operator.h"

namespace tessera::testing {

/// y = x, by an "exchange" that makes every mistake of its user visible: the copy is made when it
/// is waited for, from what stands in x then; until then y holds NaN, and the scratch memory must
/// stay as it was.
class SlowCopy final : public Operator {
 public:
  static constexpr int64_t kWorkspaceBytes = 192;

  static constexpr std::string_view kName = "slow_copy";
  enum Input : int { kX };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override {
    return {inputs[kX]};
  }
  bool communicates() const override { return true; }
  void differentiate(GradientBuilder& builder) const override {
    if (const auto grad = builder.grad_output(kY))
      builder.set_grad_input(kX, builder.emit(std::make_shared<SlowCopy>(), {*grad})[kY]);
  }
};

class SlowCopyWork final : public Work {
 public:
  explicit SlowCopyWork(const Args<SlowCopy>& args)
      : from_(args.in(SlowCopy::kX)), to_(args.out(SlowCopy::kY)), workspace_(args.workspace) {
    std::ranges::fill(workspace_, kMark);
    poison();
  }
  void wait() override {
    for (const std::byte byte : workspace_)
      ensure(byte == kMark, "the scratch memory of an exchange under way was overwritten");
    if (from_.num_bytes() > 0) std::memcpy(to_.data, from_.data, from_.num_bytes());
  }
  bool done() override {
    poison();
    return false;
  }
  void abandon() noexcept override {}

 private:
  static constexpr auto kMark = std::byte{0x5A};

  void poison() const {
    if (to_.num_bytes() > 0) std::memset(to_.data, 0xFF, to_.num_bytes());
  }

  Tensor from_;
  Tensor to_;
  std::span<std::byte> workspace_;
};

inline Pending start_slow_copy(const SlowCopy& /*op*/, const Args<SlowCopy>& args) {
  return Pending(std::make_unique<SlowCopyWork>(args));
}

/// The same result at once, as the reference.
inline void run_slow_copy(const SlowCopy& /*op*/, const Args<SlowCopy>& args) {
  const Tensor& x = args.in(SlowCopy::kX);
  if (x.num_bytes() > 0) std::memcpy(args.out(SlowCopy::kY).data, x.data, x.num_bytes());
}

inline int64_t slow_copy_workspace(const SlowCopy& /*op*/, std::span<const ValueType> /*inputs*/) {
  return SlowCopy::kWorkspaceBytes;
}

/// A kernel of SlowCopy that calls `run`.
template <typename Run>
Kernel slow_copy_kernel(Run run) {
  return Kernel::of<SlowCopy>(run, {.workspace = slow_copy_workspace});
}

}  // namespace tessera::testing
