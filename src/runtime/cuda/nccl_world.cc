#include "runtime/cuda/nccl_world.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <numeric>

#include "comm/rows.h"
#include "ops/cuda/check.h"
#include "ops/cuda/device_buffer.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/cuda/nccl_rank.h"
#include "runtime/cuda/nccl_sum.h"

namespace tessera::cuda {
namespace {

using Rows = std::span<const int64_t>;

/// Two GPUs are faster by the ring with any number of bytes. Of more, up to so many bytes from a
/// rank to all others (bench/comm_cuda_bench.cc). Compared with sizes that all ranks know.
constexpr int64_t kMostByRing = int64_t{24} << 20;

/// BF16 values that a reduction receives from each other rank at a time.
constexpr int64_t kSumPiece = int64_t{16} << 20;

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF64:
      return ncclFloat64;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    case DType::kU8:
    case DType::kU16:
    case DType::kF16:
    case DType::kE4M3:
    case DType::kE5M2:
      break;
  }
  throw InternalError(fmt::format("NCCL: a reduction of {}", dtype_name(dtype)));
}

bool all_equal(Rows rows) {
  return std::ranges::all_of(rows, [&](int64_t n) { return n == rows[0]; });
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclRank> shared, CommunicatorPtr host)
      : Communicator(host->name(), host->ranks(), host->rank(), shared->statistics),
        shared_(std::move(shared)),
        host_(std::move(host)),
        nccl_(NcclLibrary::get()),
        all_(*shared_, {name(), ranks(), rank()}, *host_),
        num_messages_(size()) {
    if (shared_->options.peer_memory) ring_ = CudaRing::make(*host_, *shared_->device);
    if (ring_) shared_->rings.emplace_back(name(), ring_.get());
  }
  ~NcclCommunicator() override {
    if (!ring_) return;
    std::erase(shared_->rings, std::pair(name(), ring_.get()));
    if (std::uncaught_exceptions() > 0) ring_->abort();
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  void connect_neighbours() override;
  bool takes_device_counts() const override { return ring_ != nullptr; }

 private:
  Pending do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) override;
  Pending do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) override;
  Pending do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) override;
  Pending do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send_rows,
                          Rows receive_rows) override;
  Pending do_all_gather_moves(RowMoves moves, Rows rows) override;
  Pending do_all_to_all_moves(RowMoves moves, Rows send_rows, Rows receive_rows) override;
  Pending do_all_to_all_moves(RowMoves moves, const Tensor& send_rows,
                              const Tensor& receive_rows) override;
  Pending do_send(const Tensor& tensor, int64_t to) override;
  Pending do_receive(const Tensor& tensor, int64_t from) override;
  Pending do_broadcast(const Tensor& tensor, int64_t root) override;
  void do_barrier() override { host_->barrier(); }

  ncclComm_t comm() { return all_.channel().comm(); }
  cudaStream_t stream() { return all_.channel().stream(); }
  size_t own() const { return rank(); }
  /// Whether NCCL is behind with any number of bytes, or for so many for each other rank at most.
  bool goes_by_ring() const { return ring_ != nullptr && size() == 2; }
  bool goes_by_ring(int64_t bytes) const {
    return goes_by_ring() || (ring_ != nullptr && bytes <= kMostByRing / (size() - 1));
  }
  /// NCCL does not sum BF16 in F32, so the alternative is an exchange and another kernel.
  bool sums_by_ring(DType dtype, int64_t bytes) const {
    return ring_ != nullptr &&
           (dtype == DType::kBF16 || (dtype == DType::kF32 && goes_by_ring(bytes)));
  }
  bool is_observed() const { return shared_->statistics->observed(); }
  template <typename Issue>
  Pending start(CommKind kind, const Issue& issue) {
    return all_.channel().start(kind, num_collectives_++, issue, is_observed());
  }
  /// Several of NCCL's operations as one.
  template <typename Issue>
  void together(const Issue& issue) {
    nccl_.check(nccl_.group_start());
    issue();
    nccl_.check(nccl_.group_end());
  }
  void copy(void* to, const void* from, int64_t num_bytes);
  void gather_rows(const RowMove& move, Rows rows);
  void copy_own_rows(const RowMove& move, Rows send_rows, Rows receive_rows);
  void swap_rows(const RowMove& move, Rows send_rows, Rows receive_rows);
  void sum_bf16(const Tensor& in, const Tensor& out, Rows rows);
  void all_reduce_bf16(const Tensor& in, const Tensor& out);
  DeviceBuffer& sum_scratch();
  void send_first(NcclChannel& channel, bool is_sender);
  NcclChannel& messages(int64_t from, int64_t to);

  std::shared_ptr<NcclRank> shared_;
  CommunicatorPtr host_;
  const NcclLibrary& nccl_;
  // These live longer than what may use them.
  std::unique_ptr<CudaRing> ring_;  ///< null where the GPUs do not address one another's memory
  std::unique_ptr<DeviceBuffer> sum_scratch_;
  std::unique_ptr<DeviceBuffer> first_message_;
  WatchedChannel all_;
  /// By the sender's and the receiver's place: each direction between two ranks is a communicator
  /// of its own, since operations of one are in order, and two ranks may send at the same time.
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<WatchedChannel>> messages_;
  int64_t num_collectives_ = 0;
  std::vector<int64_t> num_messages_;
};

void NcclCommunicator::connect_neighbours() {
  if (!messages_.empty()) return;
  for (int64_t first = 0; first < size(); ++first) {
    const int64_t second = (first + 1) % size();
    for (const auto& [from, to] : {std::pair(first, second), std::pair(second, first)}) {
      if (messages_.contains({from, to}) || (from != rank() && to != rank())) continue;
      const std::vector<int64_t> pair{ranks()[from], ranks()[to]};
      const CommunicatorPtr host =
          shared_->host.make_group(fmt::format("{} {} to {}", name(), from, to), pair);
      auto& pair_channel = messages_[{from, to}] = std::make_unique<WatchedChannel>(
          *shared_, NcclPlace{name(), pair, from == rank() ? 0 : 1}, *host);
      send_first(pair_channel->channel(), from == rank());
    }
  }
}

/// The first message connects the two, for which both must be there: later ones never hold the host
/// back.
void NcclCommunicator::send_first(NcclChannel& channel, bool is_sender) {
  if (!first_message_) first_message_ = std::make_unique<DeviceBuffer>(1);
  void* const byte = first_message_->as<void>();
  channel
      .start(is_sender ? CommKind::kSend : CommKind::kReceive, -1,
             [&] {
               nccl_.check(
                   is_sender
                       ? nccl_.send(byte, 1, ncclUint8, 1, channel.comm(), channel.stream())
                       : nccl_.receive(byte, 1, ncclUint8, 0, channel.comm(), channel.stream()));
             })
      .wait();
}

NcclChannel& NcclCommunicator::messages(int64_t from, int64_t to) {
  const auto found = messages_.find({from, to});
  ensure(found != messages_.end(), "group {}: a message from {} to {}, which are not connected",
         name(), from, to);
  return found->second->channel();
}

void NcclCommunicator::copy(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes == 0 || to == from) return;
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream()));
}

void NcclCommunicator::gather_rows(const RowMove& move, Rows rows) {
  const auto& [in, out] = move;
  const int64_t width = row_bytes(in);
  if (all_equal(rows)) {
    nccl_.check(nccl_.all_gather(in.data, out.data, rows[0] * width, ncclUint8, comm(), stream()));
    return;
  }
  for (int64_t p = 0; p < size(); ++p) {
    const size_t num_bytes = rows[p] * width;
    void* const part = row_data(out, rows_before(rows, p));
    if (num_bytes > 0)
      nccl_.check(nccl_.broadcast(p == rank() ? in.data : part, part, num_bytes, ncclUint8,
                                  static_cast<int>(p), comm(), stream()));
  }
}

Pending NcclCommunicator::do_all_gather_v(const Tensor& in, const Tensor& out, Rows rows) {
  const RowMove move{in, out};
  return do_all_gather_moves({&move, 1}, rows);
}

Pending NcclCommunicator::do_all_gather_moves(RowMoves moves, Rows rows) {
  if (moves[0].in.device == nullptr) return host_->all_gather_v(moves, rows);
  return start(CommKind::kAllGather, [&] {
    const int64_t most = *std::ranges::max_element(rows);
    if (goes_by_ring(most * row_bytes(moves[0].in))) {
      for (const RowMove& move : moves) ring_->all_gather(move, rows, stream());
      return;
    }
    together([&] {
      for (const RowMove& move : moves) gather_rows(move, rows);
    });
  });
}

Pending NcclCommunicator::do_reduce_scatter_v(const Tensor& in, const Tensor& out, Rows rows) {
  if (in.device == nullptr) return host_->reduce_scatter_v(in, out, rows);
  return start(CommKind::kReduceScatter, [&] {
    const int64_t width = row_elements(in);
    if (sums_by_ring(in.dtype, *std::ranges::max_element(rows) * row_bytes(in)))
      return ring_->reduce_scatter(in, out, rows, stream());
    if (in.dtype == DType::kBF16) return sum_bf16(in, out, rows);
    const ncclDataType_t type = type_of(in.dtype);
    if (all_equal(rows)) {
      nccl_.check(nccl_.reduce_scatter(in.data, out.data, rows[0] * width, type, ncclSum, comm(),
                                       stream()));
      return;
    }
    together([&] {
      for (int64_t p = 0; p < size(); ++p) {
        const size_t count = rows[p] * width;
        if (count > 0)
          nccl_.check(nccl_.reduce(row_data(in, rows_before(rows, p)), out.data, count, type,
                                   ncclSum, static_cast<int>(p), comm(), stream()));
      }
    });
  });
}

DeviceBuffer& NcclCommunicator::sum_scratch() {
  if (!sum_scratch_) {
    sum_scratch_ = std::make_unique<DeviceBuffer>(
        static_cast<size_t>((size() - 1) * kSumPiece * dtype_size(DType::kBF16)));
  }
  return *sum_scratch_;
}

/// Every rank sends part i to rank i, piece by piece, which sums them.
void NcclCommunicator::sum_bf16(const Tensor& in, const Tensor& out, Rows rows) {
  const int64_t width = row_elements(in);
  const int64_t most = *std::ranges::max_element(rows) * width;
  const auto* const values = in.as<Bf16>();
  Bf16* const scratch = static_cast<Bf16*>(sum_scratch().as<void>());
  for (int64_t first = 0; first < most; first += kSumPiece) {
    const auto piece = [&](int64_t p) {
      return std::clamp<int64_t>(rows[p] * width - first, 0, kSumPiece);
    };
    const int64_t count = piece(rank());
    together([&] {
      Bf16* to = scratch;
      for (int64_t p = 0; p < size(); ++p) {
        if (p == rank()) continue;
        if (piece(p) > 0)
          nccl_.check(nccl_.send(values + rows_before(rows, p) * width + first, piece(p),
                                 ncclBfloat16, static_cast<int>(p), comm(), stream()));
        if (count > 0)
          nccl_.check(
              nccl_.receive(to, count, ncclBfloat16, static_cast<int>(p), comm(), stream()));
        to += count;
      }
    });
    all_.channel().settle();
    launch_bf16_sum({.own_part = values + rows_before(rows, rank()) * width + first,
                     .others = scratch,
                     .out = out.as<Bf16>() + first,
                     .count = count,
                     .own = static_cast<int>(rank()),
                     .num_parts = static_cast<int>(size())},
                    stream());
  }
}

/// The elements are cut over the ranks, each sums its part, and the parts are gathered.
void NcclCommunicator::all_reduce_bf16(const Tensor& in, const Tensor& out) {
  const int64_t count = in.num_elements();
  const int64_t share = (count + size() - 1) / size();
  std::vector<int64_t> parts;
  for (int64_t p = 0; p < size(); ++p)
    parts.push_back(std::clamp<int64_t>(count - p * share, 0, share));
  const Tensor flat_in{in.data, in.dtype, {count}, in.device};
  const Tensor part_of_own{
      out.as<Bf16>() + std::min(rank() * share, count), out.dtype, {parts[own()]}, out.device};
  sum_bf16(flat_in, part_of_own, parts);
  together([&] {
    for (int64_t p = 0; p < size(); ++p) {
      const size_t num = parts[p];
      void* const part = out.as<Bf16>() + std::min(p * share, count);
      if (num > 0)
        nccl_.check(
            nccl_.broadcast(part, part, num, ncclBfloat16, static_cast<int>(p), comm(), stream()));
    }
  });
}

Pending NcclCommunicator::do_all_reduce(const Tensor& in, const Tensor& out, ReduceOp op) {
  if (in.device == nullptr) return host_->all_reduce(in, out, op);
  return start(CommKind::kAllReduce, [&] {
    if (op == ReduceOp::kSum && sums_by_ring(in.dtype, in.num_bytes() / size()))
      return ring_->all_reduce(in, out, stream());
    if (in.dtype == DType::kBF16 && op == ReduceOp::kSum) return all_reduce_bf16(in, out);
    nccl_.check(nccl_.all_reduce(in.data, out.data, in.num_elements(), type_of(in.dtype),
                                 op == ReduceOp::kSum ? ncclSum : ncclMax, comm(), stream()));
  });
}

void NcclCommunicator::copy_own_rows(const RowMove& move, Rows send_rows, Rows receive_rows) {
  copy(row_data(move.out, rows_before(receive_rows, rank())),
       row_data(move.in, rows_before(send_rows, rank())), send_rows[own()] * row_bytes(move.in));
}

void NcclCommunicator::swap_rows(const RowMove& move, Rows send_rows, Rows receive_rows) {
  const int64_t width = row_bytes(move.in);
  for (int64_t p = 0; p < size(); ++p) {
    if (p == rank()) continue;
    const size_t sent = send_rows[p] * width;
    const size_t received = receive_rows[p] * width;
    if (sent > 0)
      nccl_.check(nccl_.send(row_data(move.in, rows_before(send_rows, p)), sent, ncclUint8,
                             static_cast<int>(p), comm(), stream()));
    if (received > 0)
      nccl_.check(nccl_.receive(row_data(move.out, rows_before(receive_rows, p)), received,
                                ncclUint8, static_cast<int>(p), comm(), stream()));
  }
}

Pending NcclCommunicator::do_all_to_all_v(const Tensor& in, const Tensor& out, Rows send_rows,
                                          Rows receive_rows) {
  const RowMove move{in, out};
  return do_all_to_all_moves({&move, 1}, send_rows, receive_rows);
}

Pending NcclCommunicator::do_all_to_all_moves(RowMoves moves, Rows send_rows, Rows receive_rows) {
  if (moves[0].in.device == nullptr) return host_->all_to_all_v(moves, send_rows, receive_rows);
  return start(CommKind::kAllToAll, [&] {
    if (goes_by_ring()) {
      for (const RowMove& move : moves) ring_->all_to_all(move, send_rows, receive_rows, stream());
      return;
    }
    for (const RowMove& move : moves) copy_own_rows(move, send_rows, receive_rows);
    together([&] {
      for (const RowMove& move : moves) swap_rows(move, send_rows, receive_rows);
    });
  });
}

Pending NcclCommunicator::do_all_to_all_moves(RowMoves moves, const Tensor& send_rows,
                                              const Tensor& receive_rows) {
  return start(CommKind::kAllToAll, [&] {
    for (const RowMove& move : moves) ring_->all_to_all(move, send_rows, receive_rows, stream());
  });
}

Pending NcclCommunicator::do_send(const Tensor& tensor, int64_t to) {
  if (tensor.device == nullptr) return host_->send(tensor, to);
  NcclChannel& channel = messages(rank(), to);
  const auto issue = [&] {
    if (tensor.num_bytes() > 0)
      nccl_.check(nccl_.send(tensor.data, tensor.num_bytes(), ncclUint8, 1, channel.comm(),
                             channel.stream()));
  };
  return channel.start(CommKind::kSend, num_messages_[to]++, issue, is_observed());
}

Pending NcclCommunicator::do_receive(const Tensor& tensor, int64_t from) {
  if (tensor.device == nullptr) return host_->receive(tensor, from);
  NcclChannel& channel = messages(from, rank());
  const auto issue = [&] {
    if (tensor.num_bytes() > 0)
      nccl_.check(nccl_.receive(tensor.data, tensor.num_bytes(), ncclUint8, 0, channel.comm(),
                                channel.stream()));
  };
  return channel.start(CommKind::kReceive, num_messages_[from]++, issue, is_observed());
}

Pending NcclCommunicator::do_broadcast(const Tensor& tensor, int64_t root) {
  if (tensor.device == nullptr) return host_->broadcast(tensor, root);
  return start(CommKind::kBroadcast, [&] {
    nccl_.check(nccl_.broadcast(tensor.data, tensor.data, tensor.num_bytes(), ncclUint8,
                                static_cast<int>(root), comm(), stream()));
  });
}

class NcclWorld final : public World {
 public:
  NcclWorld(World& host, std::shared_ptr<CudaDevice> device, const CommOptions& options)
      : shared_(new NcclRank{host, std::move(device), options}) {
    NcclRank* const shared = shared_.get();
    shared_->device->set_watch(
        {.look = [shared](Device::Time begin) { shared->watch_device(begin); },
         .give_up = [shared] { shared->abort_all(); }});
  }
  ~NcclWorld() override { shared_->device->set_watch({}); }

  int64_t rank() const override { return shared_->host.rank(); }
  int64_t size() const override { return shared_->host.size(); }
  CommunicatorPtr make_group(const std::string& name, const std::vector<int64_t>& ranks) override {
    CommunicatorPtr host = shared_->host.make_group(name, ranks);
    if (ranks.size() == 1) return make_single_communicator(name, rank(), shared_->statistics);
    return std::make_shared<NcclCommunicator>(shared_, std::move(host));
  }
  const CommStatistics& statistics() const override { return *shared_->statistics; }
  CommStatistics& statistics() override { return *shared_->statistics; }
  bool ending() override { return shared_->host.ending(); }

 private:
  void end_others(int exit_code) override { shared_->host.abort(exit_code); }

  std::shared_ptr<NcclRank> shared_;
};

}  // namespace

std::unique_ptr<World> make_nccl_world(World& host, std::shared_ptr<CudaDevice> device,
                                       const CommOptions& options) {
  return std::make_unique<NcclWorld>(host, std::move(device), options);
}

}  // namespace tessera::cuda

namespace tessera {

NcclInfo find_nccl() {
  try {
    return {.built = true, .version = cuda::NcclLibrary::get().version, .why = ""};
  } catch (const UserError& error) {
    return {.built = true, .version = 0, .why = error.what()};
  }
}

std::unique_ptr<World> make_gpu_world(World& host, const Backend& backend,
                                      const CommOptions& options) {
  auto* const device = dynamic_cast<cuda::CudaDevice*>(&backend.device());
  ensure(device != nullptr, "NCCL between devices such as {}", backend.device().name());
  return cuda::make_nccl_world(host, device->shared_from_this(), options);
}

}  // namespace tessera
