#include "step/link_queues.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/error.h"

namespace tessera {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kUnknown = -1;

}  // namespace

std::vector<LinkQueues::Transfer*> LinkQueues::State::find_heads(std::vector<ExchangeTime>& times) {
  std::vector<Transfer*> heads;
  for (std::deque<Transfer>& queue : queues) {
    if (queue.empty()) continue;
    heads.push_back(&queue.front());
    double& begin = times[queue.front().number].begin;
    if (begin < 0) begin = now;
  }
  return heads;
}

void LinkQueues::State::advance(double until, std::vector<ExchangeTime>& times) {
  const std::vector<Transfer*> heads = find_heads(times);
  std::array<double, 3> under_way{};
  for (const Transfer* head : heads) ++under_way.at(static_cast<size_t>(head->link));
  const auto sharers = [&](const Transfer& head) {
    return head.link == LinkKind::kOwn ? 1.0 : under_way.at(static_cast<size_t>(head.link));
  };
  double first = kNever;
  for (const Transfer* head : heads) first = std::min(first, head->left * sharers(*head));
  if (first == kNever && until == kNever) return;
  const bool one_ends = first <= until - now;
  const double passed = one_ends ? first : until - now;
  now = one_ends ? now + first : until;
  for (Transfer* head : heads) {
    if (one_ends && head->left * sharers(*head) <= first) times[head->number].end = now;
    head->left -= passed / sharers(*head);
  }
  for (std::deque<Transfer>& queue : queues) {
    if (!queue.empty() && times[queue.front().number].end >= 0) queue.pop_front();
  }
}

size_t LinkQueues::add_queue() {
  state_.queues.emplace_back();
  return state_.queues.size() - 1;
}

size_t LinkQueues::start(size_t queue, LinkKind link, double now, double seconds) {
  ensure(now >= state_.now, "link queues: an exchange starts at {}, before {}", now, state_.now);
  while (state_.now < now) state_.advance(now, times_);
  const size_t number = times_.size();
  times_.push_back({.came = now, .begin = kUnknown, .end = kUnknown});
  state_.queues.at(queue).push_back({.number = number, .link = link, .left = seconds});
  return number;
}

ExchangeTime LinkQueues::find(size_t number) const {
  if (times_.at(number).end >= 0) return times_[number];
  // What is under way is at the end of the list, but for few.
  State state = state_;
  size_t first = number;
  for (const std::deque<Transfer>& queue : state.queues) {
    if (!queue.empty()) first = std::min(first, queue.front().number);
  }
  std::vector<ExchangeTime> times(times_.begin() + static_cast<ptrdiff_t>(first), times_.end());
  for (std::deque<Transfer>& queue : state.queues) {
    for (Transfer& transfer : queue) transfer.number -= first;
  }
  while (times[number - first].end < 0) state.advance(kNever, times);
  return times[number - first];
}

}  // namespace tessera
