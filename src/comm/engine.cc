#include "comm/engine.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <thread>

namespace tessera {
namespace {

// Waits are looked at this often for whether they can still end, however short each is.
constexpr std::chrono::milliseconds kCheckInterval{5};
// What a process sent before it ended may still be on its way.
constexpr std::chrono::milliseconds kLastWords{200};

// Message tags keep operations apart that are under way at the same time. Those of one number
// modulo kNumbers start in the same order on all ranks, so that their messages meet in order.
int64_t tag_of(CommKind kind, int64_t number) {
  constexpr int64_t kKinds = 8;
  constexpr int64_t kNumbers = kNumTags / kKinds;
  const CommKind sort = kind == CommKind::kReceive ? CommKind::kSend : kind;
  return (number % kNumbers) * kKinds + static_cast<int64_t>(sort);
}

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Lets others run: ranks may be more than cores. Short waits poll; long ones sleep, for a small
// part of what they have waited already.
void pause(std::chrono::steady_clock::duration waited) {
  if (waited < std::chrono::milliseconds(2)) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(waited / 50, std::chrono::microseconds(500)));
  }
}

}  // namespace

Operation::Operation(std::shared_ptr<ProcessGroup> group, CommKind kind, int64_t number,
                     Schedule schedule)
    : group_(std::move(group)), kind_(kind), number_(number), schedule_(std::move(schedule)) {}

bool Operation::start_round() {
  round_ = {};
  if (!schedule_(step_++, round_)) return false;
  exchange_ = round_.messages.empty()
                  ? nullptr
                  : group_->channel->start(round_.messages, tag_of(kind_, number_));
  return true;
}

void Operation::advance() {
  if (step_ == 0) done_ = !start_round();
  while (!done_ && (!exchange_ || exchange_->test())) {
    exchange_.reset();
    if (round_.then) round_.then();
    done_ = !start_round();
  }
  if (done_) schedule_ = nullptr;
}

FailedWait Operation::describe_wait() const {
  FailedWait wait;
  wait.rank = group_->ranks[group_->rank];
  wait.kind = kind_;
  wait.number = number_;
  wait.group = group_->name;
  wait.ranks = group_->ranks;
  if (exchange_) {
    for (const int64_t peer : exchange_->unfinished()) wait.missing.push_back(group_->ranks[peer]);
  }
  std::ranges::sort(wait.missing);
  wait.missing.erase(std::unique(wait.missing.begin(), wait.missing.end()), wait.missing.end());
  return wait;
}

CommEngine::CommEngine(std::shared_ptr<Transport> transport,
                       std::unique_ptr<Termination> termination, const CommOptions& options)
    : transport_(std::move(transport)), termination_(std::move(termination)), options_(options) {}

CommEngine::~CommEngine() {
  if (std::uncaught_exceptions() > 0) transport_->give_up();
}

void CommEngine::throw_if_failed() const {
  if (!failure_.empty()) throw CommError(failure_);
}

void CommEngine::give_up(const std::string& why) noexcept {
  if (!failure_.empty()) return;
  failure_ = why;
  transport_->give_up();
  active_.clear();
}

const std::optional<std::string>& CommEngine::find_lost() {
  if (lost_) return lost_;
  lost_ = transport_->lost();
  if (!lost_ && watch_) lost_ = watch_->lost();
  lost_since_ = Clock::now();
  return lost_;
}

bool CommEngine::job_ending() {
  return find_lost() || (termination_ && termination_->came());
}

void CommEngine::advance_all() {
  throw_if_failed();
  try {
    // By index: nothing here adds operations, but an exception must leave the list whole.
    for (size_t i = 0; i < active_.size(); ++i) active_[i]->advance();
    std::erase_if(active_, [](const auto& operation) { return operation->done(); });
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
}

void CommEngine::start(std::shared_ptr<Operation> operation) {
  active_.push_back(std::move(operation));
  advance_all();
}

bool CommEngine::test(const Operation& operation) {
  if (!operation.done()) advance_all();
  return operation.done();
}

void CommEngine::wait(const Operation& operation) {
  const Clock::time_point begin = Clock::now();
  while (!test(operation)) {
    const Clock::time_point now = Clock::now();
    if (now - checked_ > kCheckInterval) {
      check(operation, begin);
      checked_ = now;
    }
    pause(now - begin);
  }
}

void CommEngine::check(const Operation& operation, Clock::time_point begin) {
  const Clock::time_point now = Clock::now();
  const std::string reason = reason_to_give_up(begin, now);
  if (reason.empty()) return;
  FailedWait wait = operation.describe_wait();
  wait.seconds = seconds(now - begin);
  wait.reason = reason;
  give_up(describe(wait));
  throw_if_failed();
}

std::string CommEngine::reason_to_give_up(Clock::time_point begin, Clock::time_point now) {
  const std::optional<std::string>& lost = find_lost();
  if (lost && now - lost_since_ > kLastWords) return *lost;
  if (termination_ && termination_->came()) {
    if (lost) return *lost;
    if (termination_->unanswered()) return "the job was ended (SIGTERM)";
    if (seconds(now - begin) > options_.grace_seconds)
      return fmt::format("the job is being ended (SIGTERM) and {} s went by",
                         options_.grace_seconds);
  }
  if (seconds(now - begin) > options_.timeout_seconds)
    return fmt::format("the time limit is {} s", options_.timeout_seconds);
  return "";
}

}  // namespace tessera
