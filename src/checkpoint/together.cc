#include "checkpoint/together.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>

#include "comm/error.h"
#include "core/error.h"

namespace tessera {
namespace {

enum class Fault : int64_t { kNone, kUser, kInternal };

struct Outcome {
  Fault fault = Fault::kNone;
  std::string message;
};

/// Every exception becomes an outcome, since a rank that leaves early makes the others wait for
/// ever; all but a lost connection, which they learn of as well.
Outcome attempt(const std::function<void()>& action) {
  try {
    action();
    return {};
  } catch (const CommError&) {
    throw;
  } catch (const UserError& error) {
    return {Fault::kUser, error.what()};
  } catch (const std::exception& error) {
    return {Fault::kInternal, error.what()};
  } catch (...) {
    return {Fault::kInternal, "an exception of unknown type"};
  }
}

/// Passes a call on where the last that it passed on is long enough ago.
class SometimesCall {
 public:
  explicit SometimesCall(std::function<void()> call) : call_(std::move(call)) {}
  void operator()() {
    if (std::chrono::steady_clock::now() - last_ < kInterval) return;
    call_();
    last_ = std::chrono::steady_clock::now();
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{100};
  std::function<void()> call_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

std::vector<int64_t> gather_numbers(Communicator& world, int64_t number) {
  std::vector<int64_t> numbers(world.size());
  world.all_gather(view(std::span(&number, 1), {1}), view(std::span(numbers), {world.size()}))
      .wait();
  return numbers;
}

Tensor bytes_of(std::string& text) {
  return {text.data(), DType::kU8, {std::ssize(text)}};
}

void broadcast_text(Communicator& world, std::string& text, int64_t root) {
  int64_t length = std::ssize(text);
  world.broadcast(view(std::span(&length, 1), {1}), root).wait();
  text.resize(length);
  if (length > 0) world.broadcast(bytes_of(text), root).wait();
}

}  // namespace

void together(Communicator& world, const std::function<void()>& action) {
  if (world.size() == 1) return action();
  Outcome outcome = attempt(action);
  const auto faults = gather_numbers(world, static_cast<int64_t>(outcome.fault));
  const auto failed = std::ranges::find_if(faults, [](int64_t fault) { return fault != 0; });
  if (failed == faults.end()) return;
  const int64_t rank = failed - faults.begin();
  broadcast_text(world, outcome.message, rank);
  const std::string message = fmt::format("rank {}: {}", rank, outcome.message);
  if (static_cast<Fault>(*failed) == Fault::kUser) throw UserError(message);
  throw InternalError(message);
}

void on_first_rank(Communicator& world,
                   const std::function<void(const std::function<void()>& alive)>& action) {
  if (world.size() == 1) return action([] {});
  int64_t over = 0;
  const auto tell = [&] { world.broadcast(view(std::span(&over, 1), {1}), 0).wait(); };
  if (world.rank() != 0) {
    while (over == 0) tell();
    together(world, [] {});
    return;
  }
  std::exception_ptr failure;
  try {
    action(SometimesCall(tell));
  } catch (const CommError&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
  over = 1;
  tell();
  together(world, [&] {
    if (failure) std::rethrow_exception(failure);
  });
}

std::vector<std::string> gather_texts(Communicator& world, std::string text) {
  const auto lengths = gather_numbers(world, std::ssize(text));
  if (world.rank() != 0) {
    if (!text.empty()) world.send(bytes_of(text), 0).wait();
    return {};
  }
  std::vector<std::string> texts = {std::move(text)};
  for (int64_t rank = 1; rank < world.size(); ++rank) {
    std::string& other = texts.emplace_back();
    other.resize(lengths[rank]);
    if (!other.empty()) world.receive(bytes_of(other), rank).wait();
  }
  return texts;
}

std::vector<std::string> broadcast_texts(Communicator& world,
                                         const std::vector<std::string>& texts) {
  if (world.size() == 1) return texts;
  std::vector<int64_t> lengths;
  for (const std::string& text : texts) lengths.push_back(std::ssize(text));
  auto count = static_cast<int64_t>(lengths.size());
  world.broadcast(view(std::span(&count, 1), {1}), 0).wait();
  if (count == 0) return {};
  lengths.resize(count);
  world.broadcast(view(std::span(lengths), {count}), 0).wait();
  std::string joined;
  if (world.rank() == 0) {
    for (const std::string& text : texts) joined += text;
  }
  broadcast_text(world, joined, 0);
  std::vector<std::string> result;
  size_t at = 0;
  for (const int64_t length : lengths) {
    result.push_back(joined.substr(at, length));
    at += static_cast<size_t>(length);
  }
  return result;
}

}  // namespace tessera
