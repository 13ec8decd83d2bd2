#pragma once

#include <string>
#include <vector>

#include "model/weights/parameters.h"
#include "program/differentiate.h"
#include "runtime/executable.h"

namespace tessera {

/// The parameters that one program touches: where they are among its bindings and in the rank's
/// ParameterSet.
struct ProgramParameters {
  struct Place {
    ValueId value = -1;
    size_t parameter = 0;
  };
  std::vector<Place> weights;    ///< read
  std::vector<Place> gradients;  ///< added to
};

/// How the weights of a program are named as parameters: as they are, or as a layer's.
struct WeightNames {
  const ModelConfig* config = nullptr;  ///< null: as they are
  int64_t layer = 0;

  std::string of(const std::string& weight) const {
    return config == nullptr ? weight : layer_parameter_name(*config, layer, weight);
  }
};

/// The parameters of a program. Its accumulators are linked to the weights of `forward`, whose
/// gradients they add up; others, as a cache, belong to no parameter. Of frozen parameters nothing
/// is added up.
ProgramParameters find_parameters(const Program& program, const Program& forward,
                                  const std::vector<Link>& accumulators,
                                  const ParameterSet& parameters, const WeightNames& names = {});

/// Gives a program's weights and accumulators the parameters' addresses.
void bind_parameters(const ProgramParameters& program, const ParameterSet& parameters,
                     Bindings& bindings);

/// Holds weights that are whole, and have an address, only while a program needs them, and so
/// gradient accumulators. For each run of a program: bind; the run; done.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  /// Sets the addresses of the program's weights, which are there then, and accumulators, which
  /// stay what they are until done().
  virtual void bind(const ProgramParameters& program, Bindings& bindings) = 0;
  /// The program ran: its weights are free to go.
  virtual void done(const ProgramParameters& program) = 0;

 protected:
  WeightStore() = default;
};

}  // namespace tessera
