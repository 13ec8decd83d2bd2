#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace tessera {

/// Items that are produced one by one, transformed on several threads, and consumed one by one in
/// the order in which they were produced. Each thread does whatever can be done next, so
/// `num_threads` is all that it takes; the caller's is one of them.
template <typename In, typename Out>
struct OrderedPipeline {
  std::function<std::optional<In>()> produce;  ///< nothing at the end
  std::function<Out(const In&)> transform;     ///< on any thread
  std::function<void(const In&, const Out&)> consume;
  std::function<int64_t(const In&)> weigh;
  /// Nothing more is produced while the items between producing and consuming weigh as much.
  int64_t max_weight = 0;
  /// Called by the caller's thread before each thing that it does.
  std::function<void()> pause = {};

  /// Returns when all items are consumed. An exception ends it once every item before the one that
  /// threw has been consumed, and is thrown on.
  void run(int num_threads) const;
};

namespace detail {

/// One run of a pipeline.
template <typename In, typename Out>
class PipelineRun {
 public:
  explicit PipelineRun(const OrderedPipeline<In, Out>& pipeline) : pipeline_(pipeline) {}

  /// `pause`: called before each thing that is done; null: nothing.
  void work(const std::function<void()>& pause = {}) {
    std::unique_lock lock(mutex_);
    while (!failure_) {
      if (pause) take_failure(attempt(lock, pause));
      if (failure_) break;
      if (!consuming_ && done_.contains(next_consumed_)) {
        consume(lock);
      } else if (!ended_ && !producing_ && weight_ < pipeline_.max_weight) {
        produce(lock);
      } else if (ended_ && next_consumed_ == next_produced_) {
        break;
      } else {
        changed_.wait(lock);
      }
    }
    changed_.notify_all();
  }

  void rethrow_failure() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  struct Item {
    std::optional<In> in;
    std::optional<Out> out;
    std::exception_ptr error;
    int64_t weight = 0;
  };

  /// The first one counts.
  void take_failure(const std::exception_ptr& error) {
    if (!failure_) failure_ = error;
  }

  /// Calls `action` without the lock; gives what it threw.
  template <typename Action>
  std::exception_ptr attempt(std::unique_lock<std::mutex>& lock, const Action& action) {
    std::exception_ptr error;
    lock.unlock();
    try {
      action();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    return error;
  }

  void consume(std::unique_lock<std::mutex>& lock) {
    auto node = done_.extract(next_consumed_);
    Item& item = node.mapped();
    consuming_ = true;
    take_failure(item.error ? item.error
                            : attempt(lock, [&] { pipeline_.consume(*item.in, *item.out); }));
    consuming_ = false;
    ++next_consumed_;
    weight_ -= item.weight;
    changed_.notify_all();
  }

  void produce(std::unique_lock<std::mutex>& lock) {
    Item item;
    producing_ = true;
    item.error = attempt(lock, [&] { item.in = pipeline_.produce(); });
    producing_ = false;
    ended_ = !item.in;
    changed_.notify_all();
    if (ended_ && !item.error) return;
    const int64_t index = next_produced_++;
    if (item.in) {
      item.weight = pipeline_.weigh(*item.in);
      weight_ += item.weight;
      item.error = attempt(lock, [&] { item.out = pipeline_.transform(*item.in); });
    }
    done_.emplace(index, std::move(item));
    changed_.notify_all();
  }

  const OrderedPipeline<In, Out>& pipeline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // All below belong to the mutex.
  std::map<int64_t, Item> done_;  // transformed, by number
  int64_t next_produced_ = 0;
  int64_t next_consumed_ = 0;
  int64_t weight_ = 0;
  bool producing_ = false;
  bool consuming_ = false;
  bool ended_ = false;
  std::exception_ptr failure_;
};

}  // namespace detail

template <typename In, typename Out>
void OrderedPipeline<In, Out>::run(int num_threads) const {
  detail::PipelineRun<In, Out> run(*this);
  {
    std::vector<std::jthread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back([&run] { run.work(); });
    run.work(pause);
  }
  run.rethrow_failure();
}

}  // namespace tessera
