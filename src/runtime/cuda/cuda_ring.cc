#include "runtime/cuda/cuda_ring.h"

#include <algorithm>
#include <cstring>

#include "comm/process_watch.h"
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

template <typename T>
std::vector<T> gather(Communicator& host, const T& own) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(host.size()));
  const auto bytes = static_cast<int64_t>(sizeof(T));
  T sent = own;
  host.all_gather({&sent, DType::kU8, {bytes}}, {all.data(), DType::kU8, {host.size() * bytes}})
      .wait();
  return all;
}

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
  return status == cudaErrorPeerAccessAlreadyEnabled ? !succeeds(status) : succeeds(status);
}

size_t chunks_and_counts(int num_ranks) {
  return ring_chunk_bytes(num_ranks) + 2 * ring_count_bytes(num_ranks);
}

}  // namespace

std::unique_ptr<CudaRing> CudaRing::make(Communicator& host, CudaDevice& device) {
  if (host.size() > kMaxRingRanks) return nullptr;
  std::unique_ptr<CudaRing> ring(new CudaRing(static_cast<int>(host.size())));
  const std::vector<char> reached =
      gather(host, static_cast<char>(ring->open_all(host, device) ? 1 : 0));
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
  const std::vector<Card> cards = gather(host, own);
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

void CudaRing::abort() noexcept {
  *static_cast<volatile int*>(&status_->abort) = 1;
}

int64_t CudaRing::waits_for() const {
  return *static_cast<volatile int*>(&status_->waits_for) - 1;
}

}  // namespace tessera::cuda
