#include "comm/mpi/mpi_transport.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <thread>

#include "comm/error.h"
#include "core/exit_code.h"

namespace tessera {
namespace {

// MPI counts with int; longer messages go in pieces of this size.
constexpr int64_t kMaxBytes = int64_t{1} << 30;
constexpr int64_t kMinChannels = int64_t{1} << 13;
constexpr unsigned kAbortSeconds = 10;
constexpr double kLongestSeconds = 1e8;  // what the clock's nanoseconds can hold

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(fmt::format("MPI failed in {}: {}", what, text.data()));
}

/// While it lives, a call that waits for other ranks and cannot be interrupted is under way: when
/// it takes longer than the time limit, this process says so and ends, and the launcher ends the
/// rest.
class CallLimit {
 public:
  CallLimit(const char* call, const MpiJoin& join)
      : watch_([this, call, join] { watch(call, join); }) {}
  ~CallLimit() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    watch_.join();
  }
  CallLimit(const CallLimit&) = delete;
  CallLimit& operator=(const CallLimit&) = delete;

 private:
  void watch(const char* call, const MpiJoin& join) {
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> limit(std::min(join.timeout_seconds, kLongestSeconds));
    if (changed_.wait_for(lock, limit, [this] { return over_; })) return;
    const std::string text = fmt::format(
        "tessera: rank {} waited {:.1f} s in {}, for another rank that did not come: the time "
        "limit is {} s\n",
        join.rank, join.timeout_seconds, call, join.timeout_seconds);
    std::fputs(text.c_str(), stderr);
    _exit(kUserErrorCode);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread watch_;  ///< last, since it uses the others
};

class MpiExchange : public Exchange {
 public:
  /// Starts a message, before the first test; `peer` is its rank in MPI.
  void start(const Message& message, int peer, int tag) {
    for (int64_t begin = 0; begin < message.bytes; begin += kMaxBytes)
      start_piece(message, begin, peer, tag);
    num_left_ = requests_.size();
    indices_.resize(num_left_);
    statuses_.resize(num_left_);
  }

  bool test() override {
    if (num_left_ == 0) return true;
    int num_done = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &num_done,
                                  indices_.data(), statuses_.data());
    if (code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
    for (size_t i = 0; i < static_cast<size_t>(std::max(num_done, 0)); ++i) {
      if (code == MPI_ERR_IN_STATUS) check(statuses_[i].MPI_ERROR, "a message");
      finish(pieces_[indices_[i]], statuses_[i]);
    }
    return num_left_ == 0;
  }

  std::vector<int64_t> unfinished() const override {
    std::vector<int64_t> peers;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL) peers.push_back(pieces_[i].peer);
    }
    return peers;
  }

 private:
  struct Piece {
    bool is_send = false;
    int64_t peer = 0;
    int bytes = 0;
  };

  void start_piece(const Message& message, int64_t begin, int peer, int tag) {
    const int bytes = static_cast<int>(std::min(kMaxBytes, message.bytes - begin));
    void* data = static_cast<std::byte*>(message.data) + begin;
    MPI_Request request = MPI_REQUEST_NULL;
    if (message.is_send) {
      check(MPI_Isend(data, bytes, MPI_BYTE, peer, tag, MPI_COMM_WORLD, &request), "MPI_Isend");
    } else {
      check(MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, MPI_COMM_WORLD, &request), "MPI_Irecv");
    }
    requests_.push_back(request);
    // test() completes requests, which the checker does not see.
    // NOLINTNEXTLINE(clang-analyzer-optin.mpi.MPI-Checker)
    pieces_.push_back({message.is_send, message.peer, bytes});
  }

  void finish(const Piece& piece, const MPI_Status& status) {
    --num_left_;
    if (piece.is_send) return;
    int bytes = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    ensure(bytes == piece.bytes, "{} bytes came from member {} of the group where {} were expected",
           bytes, piece.peer, piece.bytes);
  }

  std::vector<MPI_Request> requests_;
  std::vector<Piece> pieces_;  ///< by request
  size_t num_left_ = 0;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

/// All groups use one MPI communicator, since making others waits for ranks without a limit. Two
/// ranks make the groups that hold both in the same order, so the number of a group among these,
/// which both count without asking, keeps its messages apart by their tags.
class MpiChannel : public Channel {
 public:
  struct Member {
    int rank = 0;
    int64_t number = 0;
  };

  explicit MpiChannel(std::vector<Member> members) : members_(std::move(members)) {}
  std::unique_ptr<Exchange> start(std::span<const Message> messages, int64_t tag) override {
    auto exchange = std::make_unique<MpiExchange>();
    for (const Message& message : messages) {
      const Member& member = members_[message.peer];
      exchange->start(message, member.rank, static_cast<int>(member.number * kNumTags + tag));
    }
    return exchange;
  }

 private:
  std::vector<Member> members_;  ///< by rank in the channel
};

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(const MpiJoin& join) : join_(join) {
    int provided = MPI_THREAD_SINGLE;
    {
      const CallLimit limit("MPI_Init_thread", join_);
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    }
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    require(provided >= MPI_THREAD_SERIALIZED,
            "this MPI library does not let threads other than the first communicate");
    int* max_tag = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&max_tag), &found),
          "MPI_Comm_get_attr");
    max_channels_ = found != 0 ? (int64_t{*max_tag} + 1) / kNumTags : 0;
    require(max_channels_ >= kMinChannels,
            "this MPI library has no message tags of 2^30 - 1, which Tessera needs; use Open MPI");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    num_channels_.resize(size_);
  }
  ~MpiTransport() override {
    if (gave_up_) return;
    const CallLimit limit("MPI_Finalize", join_);
    MPI_Finalize();
  }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  std::unique_ptr<Channel> make_channel(const std::string& /*name*/,
                                        const std::vector<int64_t>& ranks) override;
  // To MPI a rank that died is one that sends nothing.
  std::optional<std::string> lost() override { return std::nullopt; }
  void give_up() override { gave_up_ = true; }
  void abort(int exit_code) override {
    // Where the launcher is gone as well, nobody would end this process.
    std::signal(SIGALRM, SIG_DFL);
    alarm(kAbortSeconds);
    MPI_Abort(MPI_COMM_WORLD, exit_code);
  }

 private:
  const MpiJoin join_;
  int rank_ = 0;
  int size_ = 1;
  int64_t max_channels_ = 0;
  std::vector<int64_t> num_channels_;  ///< made with each rank
  bool gave_up_ = false;
};

std::unique_ptr<Channel> MpiTransport::make_channel(const std::string& name,
                                                    const std::vector<int64_t>& ranks) {
  std::vector<MpiChannel::Member> members;
  for (const int64_t rank : ranks) {
    const int64_t number = num_channels_[rank]++;
    ensure(number < max_channels_, "group \"{}\": more than {} groups with rank {}", name,
           max_channels_, rank);
    members.push_back({static_cast<int>(rank), number});
  }
  return std::make_unique<MpiChannel>(std::move(members));
}

std::unique_ptr<Transport> connect(const MpiJoin& join) {
  return std::make_unique<MpiTransport>(join);
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return text.data();
}

}  // namespace
}  // namespace tessera

extern "C" __attribute__((visibility("default")))
const tessera::MpiPlugin tessera_mpi_plugin_3 = {tessera::connect, tessera::library_version};
