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
  for (Transfer& transfer : waiting) {
    const bool is_behind = std::ranges::any_of(
        heads, [&](const Transfer* head) { return head->queue == transfer.queue; });
    if (is_behind) continue;
    heads.push_back(&transfer);
    double& begin = times[transfer.number].begin;
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
  if (one_ends)
    std::erase_if(waiting, [&](const Transfer& one) { return times[one.number].end >= 0; });
}

size_t LinkQueues::add_queue() {
  return num_queues_++;
}

size_t LinkQueues::start(size_t queue, LinkKind link, double now, double seconds) {
  ensure(queue < num_queues_, "link queues: there is no queue {}", queue);
  ensure(now >= state_.now, "link queues: an exchange starts at {}, before {}", now, state_.now);
  while (state_.now < now) state_.advance(now, times_);
  const size_t number = times_.size();
  times_.push_back({.came = now, .begin = kUnknown, .end = kUnknown});
  state_.waiting.push_back({.number = number, .queue = queue, .link = link, .left = seconds});
  return number;
}

ExchangeTime LinkQueues::find(size_t number) const {
  if (times_.at(number).end >= 0) return times_[number];
  // What is under way is at the end of the list, but for few.
  State state = state_;
  const size_t first = state.waiting.front().number;
  std::vector<ExchangeTime> times(times_.begin() + static_cast<ptrdiff_t>(first), times_.end());
  for (Transfer& transfer : state.waiting) transfer.number -= first;
  while (times[number - first].end < 0) state.advance(kNever, times);
  return times[number - first];
}

}  // namespace tessera
