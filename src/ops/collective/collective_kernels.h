#pragma once

#include <functional>
#include <utility>

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

/// Two exchanges that are one to whoever waits.
class BothWork final : public Work {
 public:
  BothWork(Pending first, Pending second) : first_(std::move(first)), second_(std::move(second)) {}

  void wait() override {
    first_.wait();
    second_.wait();
  }
  bool done() override { return first_.done() && second_.done(); }
  /// The destructors that follow abandon the exchanges.
  void abandon() noexcept override {}

 private:
  Pending first_;
  Pending second_;
};

/// Moves rows, and their scales where they have some, by exchange(from, to).
template <typename Exchange>
Pending exchange_rows(const Tensor& x, const Tensor& y, const Exchange& exchange) {
  if (!x.scale.is_scaled()) return exchange(x, y);
  Pending elements = exchange(elements_of(x), elements_of(y));
  Pending scales = exchange(row_scales_of(x), row_scales_of(y));
  return Pending(std::make_unique<BothWork>(std::move(elements), std::move(scales)));
}

/// The kernels that need nothing but a communicator.
void add_kernels(KernelTable& table);

}  // namespace tessera::collective
