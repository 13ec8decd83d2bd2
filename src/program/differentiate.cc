#include "program/differentiate.h"

#include <algorithm>
#include <map>

#include "ops/add/add.h"
#include "ops/gradient_value.h"
#include "program/import.h"

namespace tessera {
namespace {

/// For each forward value, whether a wanted gradient depends on it.
IdVector<ValueId, bool> find_differentiable(const Program& forward,
                                            const DifferentiateRequest& request) {
  IdVector<ValueId, bool> wanted(forward.num_values(), false);
  for (ValueId id = 0; id < forward.num_values(); ++id) {
    wanted[id] = forward.value(id).kind == ValueKind::kWeight;
  }
  for (const ValueId id : request.frozen) wanted[id] = false;
  for (const ValueId id : request.inputs) wanted[id] = true;
  for (const Node& node : forward.nodes()) {
    const bool any = std::ranges::any_of(node.inputs, [&](ValueId id) { return wanted[id]; });
    for (const ValueId id : node.outputs) {
      if (any && is_storage(forward.type(id).dtype)) wanted[id] = true;
    }
  }
  return wanted;
}

/// Derives one backward program; serves each node's gradient rule as its GradientBuilder.
class Differentiator final : public GradientBuilder {
 public:
  Differentiator(const Program& forward, const DifferentiateRequest& request)
      : forward_(forward),
        request_(request),
        wanted_(find_differentiable(forward, request)),
        result_{Program(forward.name() + ".backward"), {}, {}, {}, {}, {}},
        importer_(forward, result_) {}

  Backward run() {
    for (const ValueId id : request_.outputs) add_grad_output(id);
    for (auto node = forward_.nodes().rbegin(); node != forward_.nodes().rend(); ++node) {
      node_ = &*node;
      const bool reached =
          std::ranges::any_of(node->outputs, [&](ValueId id) { return grads_.contains(id); });
      const bool useful =
          std::ranges::any_of(node->inputs, [&](ValueId id) { return is_wanted(id); });
      if (reached && useful) node->op->differentiate(*this);
    }
    collect_grad_inputs();
    return std::move(result_);
  }

  ValueId input(int idx) override { return importer_.import(forward_input(idx)); }
  ValueId output(int idx) override { return importer_.import(node_->outputs.at(idx)); }

  std::optional<ValueId> grad_output(int idx) override {
    const auto found = grads_.find(node_->outputs.at(idx));
    if (found == grads_.end()) return std::nullopt;
    return found->second;
  }

  bool needs_grad(int idx) const override { return is_wanted(forward_input(idx)); }
  const ValueType& input_type(int idx) const override { return forward_.type(forward_input(idx)); }
  ValueId input_extent(int idx) override {
    ensure(input_type(idx).ragged(), "{}: input {} is not ragged", node_->op->name(), idx);
    return importer_.import(input_type(idx).extent.value());
  }

  std::vector<ValueId> emit(OperatorPtr op, const std::vector<ValueId>& inputs,
                            const std::vector<int>& accumulators) override {
    if (accumulators.size() == 1 &&
        forward_.value(forward_input(accumulators[0])).kind != ValueKind::kWeight)
      return emit_of_value(*op, inputs, accumulators[0]);
    std::vector<ValueId> targets;
    for (const int idx : accumulators) targets.push_back(accumulator(forward_input(idx)));
    return result_.program.add(std::move(op), inputs, {}, targets);
  }

  void set_grad_input(int idx, ValueId grad) override {
    const ValueId id = forward_input(idx);
    ensure(forward_.value(id).kind != ValueKind::kWeight,
           "{}: the gradient of weight '{}' must be accumulated", node_->op->name(),
           forward_.value(id).name);
    const auto found = grads_.find(id);
    const std::string name = "grad." + forward_.value(id).name;
    grads_[id] = found == grads_.end()
                     ? grad
                     : result_.program.add1(make_add(), {found->second, grad}, name);
  }

 private:
  ValueId forward_input(int idx) const { return node_->inputs.at(idx); }
  bool is_wanted(ValueId id) const { return wanted_[id]; }

  /// The gradient of a weight that is a value of the forward program.
  std::vector<ValueId> emit_of_value(const Operator& op, const std::vector<ValueId>& inputs,
                                     int idx) {
    const auto* accumulating = dynamic_cast<const AccumulatesGradient*>(&op);
    ensure(accumulating != nullptr, "{}: '{}' is not a weight: its gradient has no accumulator",
           op.name(), forward_.value(forward_input(idx)).name);
    auto outputs = result_.program.add(accumulating->with_value(), inputs);
    set_grad_input(idx, outputs.at(accumulating->gradient_output()));
    return outputs;
  }

  void add_grad_output(ValueId id) {
    const Value& value = forward_.value(id);
    const ValueId grad =
        result_.program.add_input("grad." + value.name, importer_.import_type(value.type));
    result_.grad_outputs.push_back({id, grad});
    grads_[id] = grad;
  }

  ValueId accumulator(ValueId weight) {
    const Value& value = forward_.value(weight);
    ensure(value.kind == ValueKind::kWeight,
           "'{}' is not a weight: its gradient has no accumulator", value.name);
    for (const Link& link : result_.accumulators) {
      if (link.forward == weight) return link.backward;
    }
    const ValueId id =
        result_.program.add_accumulator("grad." + value.name, with_dtype(value.type, DType::kF32));
    result_.accumulators.push_back({weight, id});
    return id;
  }

  void collect_grad_inputs() {
    std::vector<ValueId> outputs;
    for (const ValueId id : request_.inputs) {
      const auto found = grads_.find(id);
      ensure(found != grads_.end(), "no gradient reaches input '{}' of '{}'",
             forward_.value(id).name, forward_.name());
      result_.grad_inputs.push_back({id, found->second});
      outputs.push_back(found->second);
    }
    result_.program.set_outputs(std::move(outputs));
  }

  const Program& forward_;
  const DifferentiateRequest& request_;
  IdVector<ValueId, bool> wanted_;
  Backward result_;
  ForwardImporter importer_;
  std::map<ValueId, ValueId> grads_;
  const Node* node_ = nullptr;
};

}  // namespace

int64_t Backward::saved_bytes() const {
  int64_t total = 0;
  for (const Link& link : saved) total += program.type(link.backward).num_bytes();
  return total;
}

Backward differentiate(const Program& forward, const DifferentiateRequest& request) {
  return Differentiator(forward, request).run();
}

}  // namespace tessera
