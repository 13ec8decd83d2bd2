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

  std::string_view name() const override { return "slow_copy"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override {
    return {inputs[0]};
  }
  bool communicates() const override { return true; }
  void differentiate(GradientBuilder& builder) const override {
    if (const auto grad = builder.grad_output(0))
      builder.set_grad_input(0, builder.emit(std::make_shared<SlowCopy>(), {*grad})[0]);
  }
  int64_t cpu_workspace_bytes(std::span<const ValueType> /*inputs*/) const override {
    return kWorkspaceBytes;
  }
};

class SlowCopyWork final : public Work {
 public:
  explicit SlowCopyWork(const KernelArgs& args)
      : from_(args.in(0)), to_(args.out(0)), workspace_(args.workspace) {
    std::ranges::fill(workspace_, kMark);
    poison();
  }
  void wait() override {
    for (const std::byte byte : workspace_)
      ensure(byte == kMark, "the scratch memory of an exchange under way was overwritten");
    if (from_.num_bytes() > 0)
      std::memcpy(to_.data, from_.data, static_cast<size_t>(from_.num_bytes()));
  }
  bool done() override {
    poison();
    return false;
  }
  void abandon() noexcept override {}

 private:
  static constexpr auto kMark = std::byte{0x5A};

  void poison() const {
    if (to_.num_bytes() > 0) std::memset(to_.data, 0xFF, static_cast<size_t>(to_.num_bytes()));
  }

  Tensor from_;
  Tensor to_;
  std::span<std::byte> workspace_;
};

inline Pending start_slow_copy(const Operator& /*op*/, const KernelArgs& args) {
  return Pending(std::make_unique<SlowCopyWork>(args));
}

/// The same result at once, as the reference.
inline void run_slow_copy(const Operator& /*op*/, const KernelArgs& args) {
  if (args.in(0).num_bytes() > 0)
    std::memcpy(args.out(0).data, args.in(0).data, static_cast<size_t>(args.in(0).num_bytes()));
}

}  // namespace tessera::testing
