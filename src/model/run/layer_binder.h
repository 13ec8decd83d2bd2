#pragma once

#include <map>
#include <string>

#include "model/build/model_program.h"
#include "model/weights/weight_store.h"
#include "runtime/derived_program.h"

namespace tessera {

/// A program and its memory. Only the addresses of parameters may change.
struct BoundProgram {
  const Executable* program = nullptr;
  Bindings bindings;
  ProgramParameters parameters;
};

/// Gradients by the ports of the forward program that they are of.
struct PortGradients {
  PortTensors given;   ///< of what the forward program gives
  PortTensors wanted;  ///< of what it was given
};

/// The working memory of programs forward and backward, each as large as any of them needs; the
/// same where one runs behind the other.
struct WorkingMemory {
  std::byte* forward = nullptr;
  std::byte* backward = nullptr;
};

/// What is made of a layer's weights, and the scales and tally of its roundings, by the names of
/// what programs call it.
using CopyTensors = std::map<std::string, Tensor>;

/// Binds the programs of a layer, or of an end of the model, to the memory of their ports, to the
/// parameters that `names` says, and to slabs that the caller keeps. For training and
/// for inference. The parameters must outlive it.
class LayerBinder {
 public:
  /// Where `elastic`, of which the slabs are, is given, a program gets memory in it when it is
  /// bound. `copies`: of the layer's weights.
  LayerBinder(const ParameterSet& parameters, const WeightNames& names,
              const WorkingMemory& working, ElasticSlabs* elastic = nullptr,
              const CopyTensors* copies = nullptr)
      : parameters_(parameters),
        names_(names),
        working_(working),
        elastic_(elastic),
        copies_(copies) {}

  /// Throws InternalError where a port of the program has no memory in `tensors`.
  BoundProgram bind_forward(const Executable& run, const ModelProgram& layout,
                            const PortTensors& tensors, std::byte* saved = nullptr,
                            std::byte* offloaded = nullptr) const;
  /// The same where a gradient has none. `kept`: what the weights' part reads.
  BoundProgram bind_backward(const DerivedProgram& program, const ModelProgram& layout,
                             const Bindings& forward, const PortGradients& gradients,
                             std::byte* kept = nullptr) const;
  /// The weights' part, where it is split off.
  BoundProgram bind_weights(const DerivedProgram& program, const Bindings& forward,
                            const Bindings& backward) const;
  /// What makes the copies of weights, where there are any.
  BoundProgram bind_copies(const DerivedProgram& program) const;

 private:
  BoundProgram join(const Executable& run, const Program& forward,
                    const std::vector<Link>& accumulators, std::byte* working,
                    Bindings bindings) const;

  const ParameterSet& parameters_;
  WeightNames names_;
  WorkingMemory working_;
  ElasticSlabs* elastic_;
  const CopyTensors* copies_;
};

}  // namespace tessera
