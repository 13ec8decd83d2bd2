#pragma once

#include <map>
#include <memory>
#include <string>

#include "checkpoint/snapshot.h"
#include "core/memory.h"
#include "hf/transfer/transfer.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// The weights of a training on one rank, whole and in the host's memory: where they are, or copies
/// of a GPU's, for which memory is taken once. The trainer must outlive it.
class HeldWeights {
 public:
  /// Throws OutOfMemory.
  explicit HeldWeights(Trainer& trainer);

  const std::map<std::string, Shape>& shapes() const { return shapes_; }
  /// What copies take.
  int64_t num_bytes() const;
  /// The weights as they are now, valid until the next step.
  const HeldTensors& take();

 private:
  Trainer& trainer_;
  std::map<std::string, Shape> shapes_;
  std::unique_ptr<Snapshot> snapshot_;    ///< of a GPU's; null on the host
  std::map<std::string, Buffer> joined_;  ///< of tensors that are kept in several parts
  HeldTensors tensors_;
};

}  // namespace tessera
