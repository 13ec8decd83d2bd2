#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "ops/collective/collective.h"

/// What the kernels of all back ends share: communicators take the tensors of any device.
namespace tessera::collective {

/// An exchange with a step to take when it is complete.
class WorkThen final : public Work {
 public:
  WorkThen(Pending pending, std::function<void()> then)
      : pending_(std::move(pending)), then_(std::move(then)) {}

  void wait() override {
    pending_.wait();
    then_();
  }
  bool done() override { return pending_.done(); }
  /// The destructor of pending_, which follows, abandons the exchange.
  void abandon() noexcept override {}

 private:
  Pending pending_;
  std::function<void()> then_;
};

/// What an exchange moves of rows: them, and their scales where they have some.
inline std::vector<RowMove> moves_of(const Tensor& x, const Tensor& y) {
  if (!x.scale.is_scaled()) return {{x, y}};
  return {{elements_of(x), elements_of(y)}, {row_scales_of(x), row_scales_of(y)}};
}

/// The kernels that need nothing but a communicator.
void add_kernels(KernelTable& table);

}  // namespace tessera::collective
