#include "runtime/cuda/cuda_ring.h"

#include <algorithm>

#include "comm/gather_value.h"
#include "comm/process_watch.h"
#include "comm/rows.h"
#include "core/memory.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {
namespace {

/// What a rank says of its memory.
struct Card {
  ProcessName process;
  int device = 0;  ///< as its process counts them
  void* address = nullptr;
  cudaIpcMemHandle_t handle{};
  bool is_shared = false;  ///< other processes may open it
};

/// "Not possible" is no error, though the runtime keeps it as one.
bool succeeds(cudaError_t status) {
  if (status == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

bool can_reach(int device, int peer) {
  if (device == peer) return true;
  int can = 0;
  if (!succeeds(cudaDeviceCanAccessPeer(&can, device, peer)) || can == 0) return false;
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  return succeeds(status) || status == cudaErrorPeerAccessAlreadyEnabled;
}

/// The same exchange in rows of as many bytes as the kernel can move at once, of those of which all
/// counts are multiples: rows of few bytes would go one by one.
RingAllToAll in_words(RingAllToAll exchange, int num_ranks) {
  int64_t word = 16;
  const auto divides = [&](int64_t rows) { return rows * exchange.row_bytes % word == 0; };
  while (word > 1 &&
         !(std::all_of(exchange.send_rows, exchange.send_rows + num_ranks, divides) &&
           std::all_of(exchange.receive_rows, exchange.receive_rows + num_ranks, divides)))
    word /= 4;
  for (int r = 0; r < num_ranks; ++r) {
    exchange.send_rows[r] = exchange.send_rows[r] * exchange.row_bytes / word;
    exchange.receive_rows[r] = exchange.receive_rows[r] * exchange.row_bytes / word;
  }
  exchange.row_bytes = word;
  return exchange;
}

size_t chunks_and_counts(int num_ranks) {
  return ring_chunk_bytes(num_ranks) + 2 * ring_count_bytes(num_ranks);
}

}  // namespace

std::unique_ptr<CudaRing> CudaRing::make(Communicator& host, CudaDevice& device) {
  if (host.size() > kMaxRingRanks) return nullptr;
  std::unique_ptr<CudaRing> ring(new CudaRing(static_cast<int>(host.size())));
  const std::vector<char> reached =
      gather_value(host, static_cast<char>(ring->open_all(host, device) ? 1 : 0));
  if (std::ranges::count(reached, 1) < host.size()) {
    host.barrier();  // nobody frees what another still opens
    return nullptr;
  }
  ring->make_view(static_cast<int>(host.rank()));
  return ring;
}

CudaRing::CudaRing(int num_ranks)
    : memory_(new DeviceBuffer(chunks_and_counts(num_ranks), "exchanges")),
      counts_(2 * ring_count_bytes(num_ranks), "exchanges") {
  check(cudaMemset(memory_->as<void>(), 0, memory_->num_bytes()));
  check(cudaMemset(counts_.as<void>(), 0, counts_.num_bytes()));
  void* status = nullptr;
  check(cudaHostAlloc(&status, sizeof(RingStatus), cudaHostAllocMapped));
  status_ = new (status) RingStatus;
  check(cudaStreamSynchronize(cudaStreamLegacy));
  bases_.resize(num_ranks);
}

CudaRing::~CudaRing() {
  for (void* memory : opened_) cudaIpcCloseMemHandle(memory);
  if (status_->abort == 0) {
    cudaFreeHost(status_);
    return;
  }
  // Others may write to it until they know of the failure; the process ends soon.
  static_cast<void>(memory_.release());
}

bool CudaRing::open_all(Communicator& host, const CudaDevice& device) {
  Card own{.process = ProcessName::of_this_process(), .device = device.index()};
  own.address = memory_->as<void>();
  own.is_shared = succeeds(cudaIpcGetMemHandle(&own.handle, own.address));
  const std::vector<Card> cards = gather_value(host, own);
  for (size_t r = 0; r < cards.size(); ++r) {
    const Card& card = cards[r];
    if (card.process.machine != own.process.machine) return false;
    if (card.process.pid == own.process.pid) {
      if (!can_reach(own.device, card.device)) return false;
      bases_[r] = static_cast<std::byte*>(card.address);
      continue;
    }
    void* opened = nullptr;
    if (!card.is_shared ||
        !succeeds(cudaIpcOpenMemHandle(&opened, card.handle, cudaIpcMemLazyEnablePeerAccess)))
      return false;
    opened_.push_back(opened);
    bases_[r] = static_cast<std::byte*>(opened);
  }
  return true;
}

void CudaRing::make_view(int rank) {
  const auto size = static_cast<int>(bases_.size());
  view_.rank = rank;
  view_.size = size;
  for (int r = 0; r < size; ++r) {
    view_.chunks[r] = bases_[r];
    std::byte* const counts = bases_[r] + ring_chunk_bytes(size);
    view_.put[r] = reinterpret_cast<uint64_t*>(counts);
    view_.taken[r] = reinterpret_cast<uint64_t*>(counts + ring_count_bytes(size));
  }
  view_.sent = counts_.as<uint64_t>();
  view_.received = counts_.as<uint64_t>() + int64_t{kRingChannels} * size;
  void* status = nullptr;
  check(cudaHostGetDevicePointer(&status, status_, 0));
  view_.status = static_cast<RingStatus*>(status);
}

void CudaRing::all_gather(const RowMove& move, std::span<const int64_t> rows,
                          cudaStream_t stream) const {
  RingAllToAll gathering{
      .from = move.in.data, .to = move.out.data, .row_bytes = row_bytes(move.in), .gathers = true};
  std::fill_n(gathering.send_rows, view_.size, rows[view_.rank]);
  std::ranges::copy(rows, gathering.receive_rows);
  launch_ring_all_to_all(view_, in_words(gathering, view_.size), stream);
}

void CudaRing::all_to_all(const RowMove& move, std::span<const int64_t> send_rows,
                          std::span<const int64_t> receive_rows, cudaStream_t stream) const {
  RingAllToAll exchange{.from = move.in.data, .to = move.out.data, .row_bytes = row_bytes(move.in)};
  std::ranges::copy(send_rows, exchange.send_rows);
  std::ranges::copy(receive_rows, exchange.receive_rows);
  launch_ring_all_to_all(view_, in_words(exchange, view_.size), stream);
}

void CudaRing::all_to_all(const RowMove& move, const Tensor& send_rows, const Tensor& receive_rows,
                          cudaStream_t stream) const {
  launch_ring_all_to_all(view_,
                         {.from = move.in.data,
                          .to = move.out.data,
                          .row_bytes = row_bytes(move.in),
                          .device_send_rows = send_rows.as<int64_t>(),
                          .device_receive_rows = receive_rows.as<int64_t>()},
                         stream);
}

void CudaRing::reduce_scatter(const Tensor& in, const Tensor& out, std::span<const int64_t> rows,
                              cudaStream_t stream) const {
  RingSum sum{.from = in.data, .to = out.data};
  sum.is_f32 = in.dtype == DType::kF32;
  for (size_t r = 0; r < rows.size(); ++r) sum.counts[r] = rows[r] * row_elements(in);
  launch_ring_sum(view_, sum, stream);
}

/// The elements are cut over the ranks, each sums its part, and the parts are gathered.
void CudaRing::all_reduce(const Tensor& in, const Tensor& out, cudaStream_t stream) const {
  constexpr int64_t kGrain = 64;  // parts begin at whole vectors
  const int64_t count = in.num_elements();
  const int64_t share = align_up((count + view_.size - 1) / view_.size, kGrain);
  std::vector<int64_t> parts;
  for (int64_t r = 0; r < view_.size; ++r)
    parts.push_back(std::clamp<int64_t>(count - r * share, 0, share));
  const int64_t own = parts[view_.rank];
  auto* const own_part = static_cast<std::byte*>(out.data) +
                         std::min(view_.rank * share, count) * dtype_size(in.dtype);
  reduce_scatter({in.data, in.dtype, {count}, in.device}, {own_part, in.dtype, {own}, in.device},
                 parts, stream);
  all_gather({{own_part, in.dtype, {own}, in.device}, {out.data, in.dtype, {count}, in.device}},
             parts, stream);
}

void CudaRing::abort() noexcept {
  *static_cast<volatile int*>(&status_->abort) = 1;
}

int64_t CudaRing::waits_for() const {
  return *static_cast<volatile int*>(&status_->waits_for) - 1;
}

}  // namespace tessera::cuda
