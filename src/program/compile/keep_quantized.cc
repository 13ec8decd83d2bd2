#include "program/compile/keep_quantized.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "ops/permute/permute.h"
#include "ops/quantize/quantize.h"
#include "program/compile/recompute.h"

namespace tessera {
namespace {

bool is_quantize(const Node& node) {
  return dynamic_cast<const Quantize*>(node.op.get()) != nullptr;
}

/// What the forward program has quantized: by the value, and how. Rows that were permuted may have
/// been quantized before.
class QuantizedValues {
 public:
  explicit QuantizedValues(const Program& forward) {
    std::map<std::vector<ValueId>, ValueId> permuted;
    std::map<ValueId, const Node*> made_by;
    for (const Node& node : forward.nodes()) {
      if (is_quantize(node))
        found_.try_emplace({node.inputs[Quantize::kX], node.op->attributes()},
                           node.outputs[Quantize::kY]);
      if (dynamic_cast<const Permute*>(node.op.get()) != nullptr)
        add_permuted(node, made_by, permuted);
      for (const ValueId id : node.outputs) made_by[id] = &node;
    }
    // In whichever order both permutations stand.
    for (const auto& [key, rows] : waiting_) {
      const auto& [inputs, how] = key;
      const auto plain = permuted.find(inputs);
      if (plain != permuted.end()) found_.try_emplace({plain->second, how}, rows);
    }
  }

  std::optional<ValueId> find(ValueId value, const std::string& how) const {
    const auto found = found_.find({value, how});
    if (found == found_.end()) return std::nullopt;
    return found->second;
  }

 private:
  void add_permuted(const Node& node, const std::map<ValueId, const Node*>& made_by,
                    std::map<std::vector<ValueId>, ValueId>& permuted) {
    const auto maker = made_by.find(node.inputs[Permute::kX]);
    if (maker == made_by.end() || !is_quantize(*maker->second)) {
      permuted.try_emplace(node.inputs, node.outputs[Permute::kRows]);
      return;
    }
    std::vector<ValueId> from = node.inputs;
    from[Permute::kX] = maker->second->inputs[Quantize::kX];
    waiting_.try_emplace({from, maker->second->op->attributes()}, node.outputs[Permute::kRows]);
  }

  std::map<std::pair<ValueId, std::string>, ValueId> found_;
  /// Rows that were quantized before they were permuted, by what of and how.
  std::map<std::pair<std::vector<ValueId>, std::string>, ValueId> waiting_;
};

/// The only node that reads the value; null where there are others, or none.
const Node* only_reader(const Program& program, ValueId value) {
  const Node* reader = nullptr;
  for (const Node& node : program.nodes()) {
    if (std::ranges::find(node.inputs, value) == node.inputs.end()) continue;
    if (reader != nullptr) return nullptr;
    reader = &node;
  }
  return program.is_output(value) ? nullptr : reader;
}

}  // namespace

Backward keep_quantized(const Program& forward, const Backward& backward) {
  const QuantizedValues quantized(forward);
  Backward changed = backward;
  for (Link& link : changed.saved) {
    const Node* const reader = only_reader(backward.program, link.backward);
    if (reader == nullptr || !is_quantize(*reader)) continue;
    const auto kept = quantized.find(link.forward, reader->op->attributes());
    if (kept) link = {*kept, reader->outputs[Quantize::kY]};
  }
  return recompute(forward, changed, {});
}

}  // namespace tessera
