#include "comm/thread/thread_hub.h"

#include <algorithm>
#include <chrono>

#include "comm/error.h"
#include "comm/thread/thread_operation.h"

namespace tessera {
namespace {

ThreadOperationPtr make_operation(CommKind kind, int64_t number, std::vector<int64_t> members) {
  auto operation = std::make_shared<ThreadOperation>();
  operation->kind = kind;
  operation->number = number;
  operation->posts.resize(members.size());
  operation->came.resize(members.size());
  operation->members = std::move(members);
  return operation;
}

std::string message_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

std::shared_ptr<ThreadGroup> ThreadHub::group(const std::string& name,
                                              const std::vector<int64_t>& ranks, int64_t instance) {
  const Lock lock(mutex_);
  std::shared_ptr<ThreadGroup>& group = groups_[{name, ranks}][instance];
  if (!group) {
    group = std::make_shared<ThreadGroup>();
    group->name = name;
    group->ranks = ranks;
  }
  return group;
}

void ThreadHub::check_kind(const ThreadGroup& group, const ThreadOperation& operation,
                           CommKind kind, int64_t rank) {
  if (operation.kind == kind) return;
  const auto other = std::ranges::find(operation.came, true) - operation.came.begin();
  const int64_t world_rank = group.ranks[rank];
  const InternalError error(
      fmt::format("collective {} of group \"{}\": rank {} starts {}, but rank {} started {}",
                  operation.number, group.name, world_rank, comm_kind_name(kind),
                  group.ranks[other], comm_kind_name(operation.kind)));
  fail_locked(world_rank, std::make_exception_ptr(error));
  throw error;
}

ThreadOperationPtr ThreadHub::collective(ThreadGroup& group, CommKind kind, int64_t number,
                                         int64_t rank, ThreadPost post) {
  Lock lock(mutex_);
  ThreadOperationPtr& slot = group.collectives[number];
  if (!slot) {
    std::vector<int64_t> members(group.ranks.size());
    for (size_t i = 0; i < members.size(); ++i) members[i] = static_cast<int64_t>(i);
    slot = make_operation(kind, number, std::move(members));
  }
  const ThreadOperationPtr operation = slot;
  check_kind(group, *operation, kind, rank);
  if (std::ranges::count(operation->came, false) == 1) group.collectives.erase(number);
  come(lock, group, operation, rank, std::move(post));
  return operation;
}

ThreadOperationPtr ThreadHub::message(ThreadGroup& group, int64_t from, int64_t to, bool is_send,
                                      const Tensor& tensor) {
  Lock lock(mutex_);
  ThreadGroup::Channel& channel = group.channels[{from, to}];
  const int64_t number = is_send ? channel.num_sent++ : channel.num_received++;
  ThreadOperationPtr operation;
  if (const auto found = channel.waiting.find(number); found != channel.waiting.end()) {
    operation = found->second;
    channel.waiting.erase(found);
  } else {
    operation = make_operation(CommKind::kSend, number, {from, to});
    channel.waiting[number] = operation;
  }
  ThreadPost post;
  post.in = tensor;
  come(lock, group, operation, is_send ? 0 : 1, std::move(post));
  return operation;
}

void ThreadHub::come(Lock& lock, const ThreadGroup& group, const ThreadOperationPtr& operation,
                     size_t member, ThreadPost post) {
  if (failure_) throw CommError(failure_text_);
  operation->posts[member] = std::move(post);
  operation->came[member] = true;
  if (std::ranges::count(operation->came, false) == 0)
    run(lock, group, operation->members[member], *operation);
}

void ThreadHub::run(Lock& lock, const ThreadGroup& group, int64_t rank,
                    ThreadOperation& operation) {
  operation.running = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    run_thread_operation(group, operation);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  operation.running = false;
  operation.done = failure == nullptr;
  if (failure) {
    fail_locked(group.ranks[rank], failure);
    std::rethrow_exception(failure);
  }
  changed_.notify_all();
}

void ThreadHub::wait(const ThreadGroup& group, int64_t rank, const ThreadOperation& operation) {
  Lock lock(mutex_);
  const auto begin = std::chrono::steady_clock::now();
  const auto limit = begin + std::chrono::duration<double>(options_.timeout_seconds);
  const auto ended = [&] { return operation.done || (failure_ && !operation.running); };
  while (!ended()) {
    const bool late = changed_.wait_until(lock, limit) == std::cv_status::timeout;
    if (late && !operation.running) break;
  }
  if (operation.done) return;
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  give_up(group, rank, operation, waited.count());
}

void ThreadHub::give_up(const ThreadGroup& group, int64_t rank, const ThreadOperation& operation,
                        double seconds) {
  FailedWait wait;
  wait.rank = group.ranks[rank];
  wait.kind = operation.kind == CommKind::kSend && operation.members[1] == rank ? CommKind::kReceive
                                                                                : operation.kind;
  wait.number = operation.number;
  wait.group = group.name;
  wait.ranks = group.ranks;
  wait.seconds = seconds;
  for (size_t i = 0; i < operation.members.size(); ++i) {
    if (!operation.came[i]) wait.missing.push_back(group.ranks[operation.members[i]]);
  }
  wait.reason =
      failure_ ? failure_text_ : fmt::format("the time limit is {} s", options_.timeout_seconds);
  const CommError error(describe(wait));
  fail_locked(wait.rank, std::make_exception_ptr(error));
  throw error;
}

bool ThreadHub::done(const ThreadOperation& operation) {
  const Lock lock(mutex_);
  if (failure_ && !operation.done && !operation.running) throw CommError(failure_text_);
  return operation.done;
}

void ThreadHub::fail(int64_t world_rank, std::exception_ptr failure) {
  const Lock lock(mutex_);
  fail_locked(world_rank, std::move(failure));
}

void ThreadHub::fail_locked(int64_t world_rank, std::exception_ptr failure, bool only_gave_up) {
  if (failure_ && !(only_gave_up_ && failed_rank_ == world_rank)) return;
  failure_text_ = fmt::format("rank {} failed: {}", world_rank, message_of(failure));
  failure_ = std::move(failure);
  failed_rank_ = world_rank;
  only_gave_up_ = only_gave_up;
  changed_.notify_all();
}

void ThreadHub::abandon(int64_t world_rank, const ThreadOperation& operation) {
  Lock lock(mutex_);
  if (!operation.done)
    fail_locked(world_rank, std::make_exception_ptr(CommError("it gave up an operation")), true);
  changed_.wait(lock, [&] { return !operation.running; });
}

std::exception_ptr ThreadHub::failure() {
  const Lock lock(mutex_);
  return failure_;
}

}  // namespace tessera
