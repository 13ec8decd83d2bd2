#include "comm/mpi/mpi_transport.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>

#include "comm/error.h"

namespace tessera {
namespace {

// MPI counts with int; longer messages go in pieces of this size.
constexpr int64_t kMaxBytes = int64_t{1} << 30;
constexpr int kTags = 1 << 30;
constexpr unsigned kAbortSeconds = 10;

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(fmt::format("MPI failed in {}: {}", what, text.data()));
}

class MpiExchange : public Exchange {
 public:
  MpiExchange(MPI_Comm comm, std::span<const Message> messages, int tag) {
    for (const Message& message : messages) {
      for (int64_t begin = 0; begin < message.bytes; begin += kMaxBytes)
        start(comm, message, begin, tag);
    }
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
      finish(pieces_[static_cast<size_t>(indices_[i])], statuses_[i]);
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

  void start(MPI_Comm comm, const Message& message, int64_t begin, int tag) {
    const int bytes = static_cast<int>(std::min(kMaxBytes, message.bytes - begin));
    void* data = static_cast<std::byte*>(message.data) + begin;
    const int peer = static_cast<int>(message.peer);
    MPI_Request request = MPI_REQUEST_NULL;
    if (message.is_send) {
      check(MPI_Isend(data, bytes, MPI_BYTE, peer, tag, comm, &request), "MPI_Isend");
    } else {
      check(MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, comm, &request), "MPI_Irecv");
    }
    requests_.push_back(request);
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

class MpiChannel : public Channel {
 public:
  explicit MpiChannel(MPI_Comm comm) : comm_(comm) {}
  // Communicators are freed by MPI_Finalize: freeing one is collective, and nothing orders the
  // destructors of different ranks.
  std::unique_ptr<Exchange> start(std::span<const Message> messages, int64_t tag) override {
    return std::make_unique<MpiExchange>(comm_, messages, static_cast<int>(tag));
  }

 private:
  MPI_Comm comm_;
};

class MpiTransport : public Transport {
 public:
  MpiTransport() {
    int provided = MPI_THREAD_SINGLE;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    require(provided >= MPI_THREAD_SERIALIZED,
            "this MPI library does not let threads other than the first communicate");
    int* max_tag = nullptr;
    int found = 0;
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&max_tag), &found),
          "MPI_Comm_get_attr");
    require(found != 0 && *max_tag >= kTags - 1,
            "this MPI library has message tags below 2^30, which Tessera needs");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  }
  ~MpiTransport() override {
    if (!gave_up_) MPI_Finalize();
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
  int rank_ = 0;
  int size_ = 1;
  bool gave_up_ = false;
};

std::unique_ptr<Channel> MpiTransport::make_channel(const std::string& /*name*/,
                                                    const std::vector<int64_t>& ranks) {
  const std::vector<int> members(ranks.begin(), ranks.end());
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group),
        "MPI_Group_incl");
  check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm), "MPI_Comm_create_group");
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return std::make_unique<MpiChannel>(comm);
}

std::unique_ptr<Transport> connect() {
  return std::make_unique<MpiTransport>();
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
const tessera::MpiPlugin tessera_mpi_plugin_2 = {tessera::connect, tessera::library_version};
