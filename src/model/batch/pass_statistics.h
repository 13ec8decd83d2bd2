#pragma once

#include <vector>

#include "core/memory.h"
#include "model/build/ports.h"

namespace tessera {

/// What the programs of an MoE layer leave for the host.
struct LayerStatistics {
  Tensor balance_loss;  ///< F32 [1]
  Tensor z_loss;        ///< F32 [1]
  Tensor score_means;   ///< F32 [E]
  Tensor counts;        ///< F32 [E], assignments
  Tensor dropped;       ///< I64 [1], assignments

  void set_ports(PortTensors& ports) const;
};

/// How many values there are of each kind.
struct StatisticsSizes {
  int64_t moe_layers = 0;
  int64_t num_experts = 0;  ///< E
  int64_t num_losses = 0;
  int64_t logit_layers = 0;  ///< that measure logits
  int64_t num_heads = 0;     ///< of these, on this rank
};

/// What the programs of a micro-batch leave for the host, together in the device's memory. Copies
/// of it wait for the host where it reaches them, so that the host may read those of many
/// micro-batches at once. Not thread-safe.
class PassStatistics {
 public:
  PassStatistics(const StatisticsSizes& sizes, Device& device);

  /// The device's memory, which programs are bound to; of MoE layers by their number among these.
  LayerStatistics layer(int64_t idx) const { return layer_in(block_, idx); }
  /// F32 [num_heads], of a layer that measures logits.
  Tensor max_logits(int64_t idx) const { return logits_in(block_, idx); }
  Tensor loss(int64_t idx) const { return loss_in(block_, idx); }

  /// Copies what is there, after all work given before. Copies take memory once: as many as wait at
  /// a time.
  void publish();
  /// The same for a device that repeats the work of a step: it makes the copy anew.
  void publish_again();
  /// A loss of the copy published last.
  Tensor published_loss(int64_t idx) const { return loss_in(copies_.at(num_published_ - 1), idx); }
  /// Goes on to the oldest copy that waits. REQUIRES that one waits.
  void take();
  /// Forgets the copies that wait.
  void clear() { num_published_ = num_taken_ = 0; }

  /// Waits until the host has what is there, for current_layer().
  void read();
  LayerStatistics current_layer(int64_t idx) const { return layer_in(current_, idx); }

  /// The copy taken last, which is there once the device was synchronised.
  LayerStatistics taken_layer(int64_t idx) const;
  float taken_loss(int64_t idx) const;
  Tensor taken_max_logits(int64_t idx) const { return logits_in(copies_.at(taken_), idx); }

 private:
  Buffer make_copy() const;
  size_t next_copy();
  LayerStatistics layer_in(const Buffer& block, int64_t idx) const;
  Tensor loss_in(const Buffer& block, int64_t idx) const;
  Tensor logits_in(const Buffer& block, int64_t idx) const;

  StatisticsSizes sizes_;
  Device& device_;
  Buffer block_;
  Buffer current_;
  std::vector<Buffer> copies_;
  size_t num_published_ = 0;
  size_t num_taken_ = 0;
  size_t taken_ = 0;
};

}  // namespace tessera
