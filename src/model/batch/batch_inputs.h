#pragma once

#include <cstddef>
#include <vector>

#include "core/memory.h"
#include "core/mirrored_tensor.h"
#include "model/batch/position_inputs.h"
#include "model/batch/staging.h"
#include "model/build/token_share.h"

namespace tessera {

/// What the random numbers of a micro-batch's routers depend on: those of an evaluation have none.
struct RouterNoise {
  bool training = false;
  uint64_t key = 0;         ///< of the run and its step
  int64_t first_token = 0;  ///< number of the micro-batch's first token in the step
};

/// The host arrays of one micro-batch, whole: every rank that shares it is given the same.
struct MicroBatch {
  Tensor tokens;      ///< I32 [T]
  Tensor labels;      ///< I32 [T], -100: no loss
  Tensor positions;   ///< I32 [T]
  Tensor cu_seqlens;  ///< I32 [max_sequences+1]
  /// Where the model's shape has them, or null: every token counts 1; all routers choose.
  Tensor weights = {};  ///< F32 [T], factors of the tokens' losses
  Tensor experts = {};  ///< I32 [MoE layers · T · K], the choices of all routers; -1: their own
  RouterNoise noise = {};
  /// Of dynamic context parallelism; or null: the ranks of cp share it as the model was built for.
  const ContextShare* context = nullptr;
};

/// Factors of a micro-batch's part in the step's loss, so that gradients of micro-batches only add
/// up: `loss` is one over the valid tokens of the *global* batch, the others are the coefficient
/// times the micro-batch's share of its tokens: of each MoE layer's loss, or once of the whole
/// model's for BalanceTokens::kModel.
struct LossScales {
  float loss = 1;
  float balance = 0;
  float z_loss = 0;
  /// λ / D over the valid tokens of the global batch: of the losses of multi-token prediction.
  float mtp = 0;

  /// All of them times a power of two.
  LossScales times(double factor) const {
    const auto by = static_cast<float>(factor);
    return {.loss = loss * by, .balance = balance * by, .z_loss = z_loss * by, .mtp = mtp * by};
  }
  bool operator==(const LossScales&) const = default;
};

/// For each token of packed sequences the index of the one `shift` further on in its sequence; -1
/// where the sequence ends before.
std::vector<int64_t> shift_in_sequences(std::span<const int32_t> cu_seqlens, int64_t num_tokens,
                                        int64_t shift);

/// Labels of a micro-batch that its `mtp_layers` layers of multi-token prediction learn from,
/// together: layer k (from 1) at a token that which the token k further on has.
int64_t count_mtp_labels(const MicroBatch& batch, int64_t mtp_layers);

/// A rank's part of the micro-batch in hand, and the scalars that its programs read: tensors of the
/// device, together in one block. For a device the host fills blocks alike in memory that both
/// reach (Staging), from which the device takes them.
struct BatchInputs {
  Tensor tokens;           ///< I32 [T_g]
  Tensor own_ids;          ///< I32 [T_l], where layers choose experts by them
  Tensor labels;           ///< I32 [T_l]
  Tensor gathered_labels;  ///< I32 [T_g]
  Tensor positions;        ///< I32, of the tokens that attention rotates
  Tensor cu_seqlens;       ///< I32 [max_sequences+1], of the whole micro-batch
  Tensor chunk_bounds;     ///< I32, of all its sequences' chunks, where layers see these
  Tensor temperatures;     ///< F32, of the tokens that attention rotates, where queries have them
  Tensor segments;       ///< I32 [T_l]: the sequence of each token, or 0 where all are one segment
  Tensor token_weights;  ///< F32 [T_l], where the shape has them
  Tensor experts;        ///< I32 [MoE layers, T_l, K], likewise
  Tensor token_numbers;  ///< I64 [T_l], where routers' inputs are jittered
  Tensor noise;          ///< I32 [MoE layers, NoiseWord], where routers are told of it
  Tensor loss_scale, grad_balance, grad_z_loss, mtp_scale;  ///< F32 [1]

  /// What a layer of multi-token prediction and its head see.
  struct Prediction {
    Tensor tokens;           ///< I32 [T_g]
    Tensor labels;           ///< I32 [T_l]
    Tensor gathered_labels;  ///< I32 [T_g]
  };
  std::vector<Prediction> predictions;  ///< by layer

  // The same for all micro-batches, or made on the way.
  MirroredTensor token_order;  ///< I32 [T]: the tokens of all ranks that share the micro-batch
  MirroredTensor grad_loss;
  OwnedTensor token_loss;  ///< the device's

  BatchInputs(const BatchShape& shape, const StageGroups& groups, const ModelConfig& config,
              Device& device);
  static int64_t count_bytes(const BatchShape& shape, const StageGroups& groups,
                             const ModelConfig& config);

  /// The memory of the ports that all micro-batches have.
  PortTensors ports() const;
  /// The choices given to a MoE layer of the model; null where none are.
  Tensor experts_of(int64_t moe_layer) const;
  /// The noise of a MoE layer of the model; null where there is none.
  Tensor noise_of(int64_t moe_layer) const;
  /// The same for a layer of multi-token prediction and its head.
  PortTensors prediction_ports(int64_t layer) const;

  /// A micro-batch as a rank sees it.
  struct Given {
    const MicroBatch& batch;
    const TokenShare& share;
    LossScales scales;
    int64_t token_ranks;
  };
  /// The host's part: leaves a micro-batch for bring(), in order. On the host it is there at once.
  void stage(const Given& given) {
    fill(device_->is_host() ? block_.data() : staging_.next(), given);
  }
  /// The same of the micro-batch with this number in a step, whose spare block was filled.
  void stage_spare(int64_t number) { staging_.next_from_spare(number); }
  /// The block, to be filled for the next step, of a micro-batch that this step staged. REQUIRES
  /// that the device is past the step before.
  std::byte* spare_block(int64_t number) const { return staging_.spare(number); }
  /// Writes a micro-batch to a block; any thread may.
  void fill(std::byte* block, const Given& given) const;
  /// The device's part: gives it the first one staged that it was not given.
  void bring() {
    if (!device_->is_host()) staging_.bring(block_.data());
  }
  /// The device has come past the bring() of the first one staged that was not released.
  void release() { staging_.release(); }
  /// Forgets all that is staged. REQUIRES that the device is past it.
  void clear() { staging_.clear(); }

 private:
  class Filler;
  BatchInputs() = default;
  int64_t place(const PortContext& context, std::byte* block, Device* device);

  Device* device_ = nullptr;
  Buffer block_;
  int64_t staged_bytes_ = 0;  ///< of the block, from its beginning: what is brought
  bool segments_are_sequences_ = false;
  int64_t chunk_ = 0;  ///< tokens of a chunk, where layers see these
  Temperatures temperature_rule_;
  double router_jitter_ = 0;
  Staging staging_;
};

}  // namespace tessera
