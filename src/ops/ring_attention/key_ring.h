#pragma once

#include "comm/communicator.h"
#include "ops/attention/attention_blocks.h"
#include "ops/attention/attention_kernels.h"

namespace tessera::attention {
inline namespace TESSERA_CPU_LEVEL {

/// Keys and values on their way around the ring. In step i a rank has those of the rank i places
/// before it in hand, and those for the next step arrive meanwhile.
class KeyRing {
 public:
  /// `k` and `v` are this rank's own; up to two more pairs are taken from `carver`.
  KeyRing(Communicator& comm, const Tensor& k, const Tensor& v, Carver& carver);

  int64_t step() const { return step_; }
  bool is_last() const { return step_ + 1 == comm_.size(); }
  /// Whose keys are in hand.
  int64_t source() const { return (comm_.rank() - step_ + comm_.size()) % comm_.size(); }
  const Tensor& k() const { return in_hand().k; }
  const Tensor& v() const { return in_hand().v; }

  /// Sends what is in hand onwards and receives what comes next; nothing in the last step.
  void start_next();
  /// Moves the transfers on; what fails shows in advance.
  void poll() noexcept;
  /// Goes on to the next step when its keys are there.
  void advance();

 private:
  struct Pair {
    Tensor k;
    Tensor v;
  };
  const Pair& in_hand() const { return step_ == 0 ? own_ : arrived_[step_ % 2]; }

  Communicator& comm_;
  Pair own_;
  Pair arrived_[2];
  Pending transfers_[4];
  int64_t step_ = 0;
};

/// Sums of the gradients of keys and values on their way to the owner of the keys, behind a KeyRing
/// and one step at a time: a rank adds its sums to those that its predecessor found for the same
/// keys in the step before.
class KeySumRing {
 public:
  KeySumRing(Communicator& comm, const AttentionOperator& op, int64_t num_tokens, Carver& carver);

  /// Starts to receive what the predecessor passed on in the step before; to be called in the steps
  /// after 1, before KeyRing::start_next, which is the order in which it is sent.
  void start_receive();
  /// Sends on `sums`, found in this step, with what was received for these keys.
  void pass_on(const KeySums& sums);
  /// Moves the transfers on; what fails shows in the next wait.
  void poll() noexcept;
  /// Adds what the others found for this rank's keys to `sums`, when it is there.
  void collect(const KeySums& sums);

 private:
  /// One key's and one head's place in the messages and in KeySums.
  struct Row {
    const float* arrived;
    float* leaving;
    float* keys;
    float* values;
  };
  template <typename Visit>
  void for_each_row(const KeySums& sums, const Visit& visit) const;

  Communicator& comm_;
  int64_t num_rows_;  ///< Nkv · T
  int64_t head_size_;
  int64_t head_size_v_;
  Tensor arriving_;  ///< F32 [Nkv · T, D + Dv]
  Tensor leaving_;
  Pending receive_;
  Pending send_;
  bool receives_ = false;
};

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera::attention
