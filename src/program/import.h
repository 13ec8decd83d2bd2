#pragma once

#include <functional>
#include <map>
#include <vector>

#include "program/differentiate.h"

namespace tessera {

/// Brings forward values into a backward program, each once, as inputs; a ragged value brings its
/// extent along.
class ForwardImporter {
 public:
  ForwardImporter(const Program& forward, Backward& backward)
      : forward_(forward), backward_(backward) {}

  /// The backward value that stands for `id`; made on first use.
  ValueId import(ValueId id);
  /// Declares that forward value `id` is `as` in the backward program (recomputed there).
  void provide(ValueId id, ValueId as) { known_[id] = as; }
  bool knows(ValueId id) const { return known_.contains(id); }
  /// `type` of the forward program, with its extent brought over.
  ValueType import_type(ValueType type);

 private:
  const Program& forward_;
  Backward& backward_;
  std::map<ValueId, ValueId> known_;
};

/// Adds a node of program `from` to `to`, of the values there that `translate` gives for its inputs
/// and for what it accumulates into. Returns its outputs, named as in `from`.
std::vector<ValueId> copy_node(Program& to, const Program& from, const Node& node,
                               const std::function<ValueId(ValueId)>& translate);

}  // namespace tessera
