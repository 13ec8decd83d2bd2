#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/error.h"
#include "comm/rows.h"
#include "core/file/file.h"

namespace tessera {

/// Ranks that are processes, joined by sockets, so that one of them can be killed: the others then
/// get CommError. Has what checkpoints use.
class ProcessCommunicator : public Communicator {
 public:
  /// `peers[r]` leads to rank r.
  ProcessCommunicator(int64_t rank, std::vector<FileDescriptor> peers)
      : Communicator("world", all_ranks(std::ssize(peers)), rank,
                     std::make_shared<CommStatistics>()),
        peers_(std::move(peers)) {}

 private:
  static std::vector<int64_t> all_ranks(int64_t count) {
    std::vector<int64_t> ranks;
    for (int64_t rank = 0; rank < count; ++rank) ranks.push_back(rank);
    return ranks;
  }

  Pending do_all_gather_v(const Tensor& in, const Tensor& out,
                          std::span<const int64_t> rows) override {
    const auto own_bytes = rows[rank()] * row_bytes(in);
    for (int64_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) send_bytes(in.data, own_bytes, peer);
    }
    for (int64_t peer = 0; peer < size(); ++peer) {
      std::byte* part = row_data(out, rows_before(rows, peer));
      if (peer != rank()) {
        receive_bytes(part, rows[peer] * row_bytes(out), peer);
      } else {
        std::memmove(part, in.data, own_bytes);
      }
    }
    return {};
  }
  Pending do_send(const Tensor& tensor, int64_t to) override {
    send_bytes(tensor.data, tensor.num_bytes(), to);
    return {};
  }
  Pending do_receive(const Tensor& tensor, int64_t from) override {
    receive_bytes(tensor.data, tensor.num_bytes(), from);
    return {};
  }
  Pending do_broadcast(const Tensor& tensor, int64_t root) override {
    if (rank() != root) return do_receive(tensor, root);
    for (int64_t peer = 0; peer < size(); ++peer) {
      if (peer != root) send_bytes(tensor.data, tensor.num_bytes(), peer);
    }
    return {};
  }
  void do_barrier() override {
    uint8_t own = 0;
    std::vector<uint8_t> all(size());
    const std::vector<int64_t> rows(all.size(), 1);
    do_all_gather_v(view(std::span(&own, 1), {1}), view(std::span(all), {size()}), rows).wait();
  }
  Pending do_reduce_scatter_v(const Tensor& /*in*/, const Tensor& /*out*/,
                              std::span<const int64_t> /*rows*/) override {
    throw InternalError("no reduce-scatter between test processes");
  }
  Pending do_all_reduce(const Tensor& /*in*/, const Tensor& /*out*/, ReduceOp /*op*/) override {
    throw InternalError("no all-reduce between test processes");
  }
  Pending do_all_to_all_v(const Tensor& /*in*/, const Tensor& /*out*/,
                          std::span<const int64_t> /*send_rows*/,
                          std::span<const int64_t> /*receive_rows*/) override {
    throw InternalError("no all-to-all between test processes");
  }

  void send_bytes(const void* data, int64_t count, int64_t to) {
    const auto* next = static_cast<const std::byte*>(data);
    while (count > 0) {
      const ssize_t sent = ::send(peers_[to].get(), next, count, MSG_NOSIGNAL);
      if (sent <= 0) throw CommError(fmt::format("rank {} is lost", to));
      next += sent;
      count -= sent;
    }
  }
  void receive_bytes(void* data, int64_t count, int64_t from) {
    auto* next = static_cast<std::byte*>(data);
    while (count > 0) {
      const ssize_t received = ::recv(peers_[from].get(), next, static_cast<size_t>(count), 0);
      if (received <= 0) throw CommError(fmt::format("rank {} is lost", from));
      next += received;
      count -= received;
    }
  }

  std::vector<FileDescriptor> peers_;
};

inline constexpr int kLostPeer = 3;
inline constexpr int kOtherError = 4;

/// The exit code of one rank's process: 0 where `body` returns, kLostPeer where a peer is lost.
inline int run_rank(int64_t rank, std::vector<FileDescriptor> peers,
                    const std::function<void(Communicator&)>& body) {
  ProcessCommunicator world(rank, std::move(peers));
  try {
    body(world);
    return 0;
  } catch (const CommError&) {
    return kLostPeer;
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    return kOtherError;
  }
}

/// Starts the ranks' processes, which end with run_rank's codes.
inline std::vector<pid_t> fork_ranks(int64_t num_ranks,
                                     const std::function<void(Communicator&)>& body) {
  const size_t count = num_ranks;
  // ends[a][b] is a's end of the connection with b.
  std::vector<std::vector<FileDescriptor>> ends(count);
  for (auto& row : ends) row.resize(count);
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = a + 1; b < count; ++b) {
      int pair[2];
      ensure(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "no socket pair");
      ends[a][b] = FileDescriptor(pair[0]);
      ends[b][a] = FileDescriptor(pair[1]);
    }
  }
  std::vector<pid_t> processes;
  for (size_t rank = 0; rank < count; ++rank) {
    processes.push_back(::fork());
    if (processes.back() != 0) continue;
    std::vector<FileDescriptor> own = std::move(ends[rank]);
    ends.clear();  // else a killed rank's connections would stay open here
    ::_exit(run_rank(static_cast<int64_t>(rank), std::move(own), body));
  }
  return processes;
}

}  // namespace tessera
