#pragma once

#include <vector>

#include "model/run/weight_store.h"
#include "optim/fully_sharded.h"

namespace tessera {

/// Cuts parameters, given by name, into what full sharding gathers at a time: each layer, and each
/// weight of the embedding and the head by itself, since a tied embedding is a weight of both.
std::vector<std::vector<size_t>> list_modules(const std::vector<std::string>& parameters);

/// A model's weights out of full sharding. Every module that a program reads is gathered for that
/// run alone, early where a buffer is free, and every module that it adds gradients to is reduced
/// after it.
class ModuleWeights final : public WeightStore {
 public:
  /// Parameters have the same indices in `sharded`, which must outlive it, and in the model.
  explicit ModuleWeights(FullySharded& sharded) : sharded_(sharded) {}

  void prepare(const ProgramParameters& program) override;
  void bind(const ProgramParameters& program, Bindings& bindings) override;
  void done(const ProgramParameters& program) override;

 private:
  /// Their modules, the largest first.
  std::vector<size_t> modules_of(const std::vector<ProgramParameters::Place>& places) const;

  FullySharded& sharded_;
};

}  // namespace tessera
