#include "ops/ring_attention/key_ring.h"

#include <exception>

namespace tessera::attention {
inline namespace TESSERA_CPU_LEVEL {
namespace {

int64_t next_rank(const Communicator& comm) {
  return (comm.rank() + 1) % comm.size();
}

int64_t previous_rank(const Communicator& comm) {
  return (comm.rank() + comm.size() - 1) % comm.size();
}

Tensor take_like(const Tensor& tensor, Carver& carver) {
  return {carver.take<std::byte>(tensor.num_bytes()), tensor.dtype, tensor.shape};
}

/// to = a + b.
void add(float* to, const float* a, const float* b, int64_t count) {
  simd::for_each_vector(count, [=](int64_t i, auto lanes) {
    simd::store(to + i, simd::load(a + i, lanes) + simd::load(b + i, lanes), lanes);
  });
}

/// Moves a transfer on; false where it failed. The back end keeps the failure for the next wait,
/// which is outside the kernels' threads.
bool moves_on(Pending& transfer) noexcept {
  try {
    static_cast<void>(transfer.done());
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

KeyRing::KeyRing(Communicator& comm, const Tensor& k, const Tensor& v, Carver& carver)
    : comm_(comm), own_{k, v} {
  for (int64_t step = 1; step < std::min<int64_t>(comm.size(), 3); ++step) {
    arrived_[step % 2].k = take_like(k, carver);
    arrived_[step % 2].v = take_like(v, carver);
  }
}

void KeyRing::start_next() {
  if (is_last()) return;
  const Pair& next = arrived_[(step_ + 1) % 2];
  transfers_[0] = comm_.receive(next.k, previous_rank(comm_));
  transfers_[1] = comm_.receive(next.v, previous_rank(comm_));
  transfers_[2] = comm_.send(k(), next_rank(comm_));
  transfers_[3] = comm_.send(v(), next_rank(comm_));
}

void KeyRing::poll() noexcept {
  for (Pending& transfer : transfers_) {
    if (!moves_on(transfer)) return;
  }
}

void KeyRing::advance() {
  for (Pending& transfer : transfers_) transfer.wait();
  ++step_;
}

KeySumRing::KeySumRing(Communicator& comm, const AttentionOperator& op, int64_t num_tokens,
                       Carver& carver)
    : comm_(comm),
      num_rows_(op.spec().num_kv_heads * num_tokens),
      head_size_(op.spec().head_size),
      head_size_v_(op.spec().head_size_v) {
  const Tensor message{nullptr, DType::kF32, {num_rows_, head_size_ + head_size_v_}};
  arriving_ = take_like(message, carver);
  leaving_ = take_like(message, carver);
}

void KeySumRing::start_receive() {
  receive_ = comm_.receive(arriving_, previous_rank(comm_));
  receives_ = true;
}

void KeySumRing::pass_on(const KeySums& sums) {
  receive_.wait();
  send_.wait();
  for_each_row(sums, [this](const Row& row) {
    if (!receives_) {
      std::copy_n(row.keys, head_size_, row.leaving);
      std::copy_n(row.values, head_size_v_, row.leaving + head_size_);
      return;
    }
    add(row.leaving, row.arrived, row.keys, head_size_);
    add(row.leaving + head_size_, row.arrived + head_size_, row.values, head_size_v_);
  });
  send_ = comm_.send(leaving_, next_rank(comm_));
}

void KeySumRing::collect(const KeySums& sums) {
  start_receive();
  receive_.wait();
  for_each_row(sums, [this](const Row& row) {
    add(row.keys, row.arrived, row.keys, head_size_);
    add(row.values, row.arrived + head_size_, row.values, head_size_v_);
  });
  send_.wait();
}

void KeySumRing::poll() noexcept {
  if (moves_on(receive_)) moves_on(send_);
}

template <typename Visit>
void KeySumRing::for_each_row(const KeySums& sums, const Visit& visit) const {
  const int64_t width = head_size_ + head_size_v_;
  const int64_t columns = tile::round_up(head_size_, tile::kLanes);
  const int64_t columns_v = tile::round_up(head_size_v_, tile::kLanes);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < num_rows_; ++row) {
    visit(Row{.arrived = arriving_.as<float>() + row * width,
              .leaving = leaving_.as<float>() + row * width,
              .keys = sums.keys + row * columns,
              .values = sums.values + row * columns_v});
  }
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera::attention
