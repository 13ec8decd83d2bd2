#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/id_vector.h"
#include "ops/operator.h"

namespace tessera {

/// Where a value comes from.
enum class ValueKind {
  kInput,         ///< bound when the program runs
  kWeight,        ///< bound when the program runs; differentiation gives it a gradient accumulator
  kAccumulator,   ///< bound when the program runs; operators add into it in place
  kIntermediate,  ///< computed by a node
};

struct Value {
  std::string name;
  ValueType type;
  ValueKind kind = ValueKind::kIntermediate;
};

struct Node {
  OperatorPtr op;
  std::vector<ValueId> inputs;
  std::vector<ValueId> outputs;
  /// Runs beside the nodes behind it, up to the first that needs it (find_waits), where the back
  /// end has a SideLane.
  bool aside = false;
};

/// A straight-line program of operators over typed values, run from the first node to the last.
/// Weights, inputs and accumulators are bound when it runs, so one program serves all layers of its
/// shape. Invariants: every node's inputs are defined before it; names of bound values and outputs
/// are unique.
class Program {
 public:
  explicit Program(std::string name = "program") : name_(std::move(name)) {}

  ValueId add_input(std::string name, const ValueType& type);
  ValueId add_weight(std::string name, const ValueType& type);
  ValueId add_accumulator(std::string name, const ValueType& type);

  /// Adds a node and returns its outputs, named by `names` where given. Outputs that
  /// op->accumulates() are the values `accumulators`, in order. Throws UserError where the shape
  /// rule refuses.
  std::vector<ValueId> add(OperatorPtr op, std::vector<ValueId> inputs,
                           const std::vector<std::string>& names = {},
                           const std::vector<ValueId>& accumulators = {});
  /// The same for an operator with one output.
  ValueId add1(OperatorPtr op, std::vector<ValueId> inputs, std::string name);

  /// Marks values that the caller reads after a run; the caller binds memory for each.
  void set_outputs(std::vector<ValueId> outputs) { outputs_ = std::move(outputs); }

  /// The same program with its nodes in another order: node i is node order[i] of this one. Values
  /// keep their ids. Throws InternalError where `order` is no permutation or a node would read what
  /// is not made yet.
  Program reordered(const std::vector<int>& order) const;

  /// The same values and outputs with other nodes. Throws InternalError where a node would read, or
  /// the program would give, what is not made.
  Program with_nodes(std::vector<Node> nodes) const;

  /// The same program where a weight is stored otherwise. What was made of it keeps its type, so
  /// its readers are to be replaced.
  Program with_weight_type(ValueId weight, const ValueType& type) const;

  /// The same, and what the nodes make has the types that their operators infer of what they read.
  Program with_inferred_nodes(std::vector<Node> nodes) const;

  const std::string& name() const { return name_; }
  const IdVector<ValueId, Value>& values() const { return values_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<ValueId>& outputs() const { return outputs_; }
  const Value& value(ValueId id) const { return values_[id]; }
  const ValueType& type(ValueId id) const { return value(id).type; }
  int num_values() const { return static_cast<int>(values_.size()); }
  bool is_output(ValueId id) const;
  /// The value of that name. Throws InternalError where there is none; names of intermediates need
  /// not be unique, the first is returned.
  ValueId find(std::string_view name) const;
  /// The types of values, in order.
  std::vector<ValueType> types(const std::vector<ValueId>& ids) const;
  /// The sum of the operators' costs, ragged dims at their bounds.
  Cost cost() const;

 private:
  ValueId add_value(Value value);

  std::string name_;
  IdVector<ValueId, Value> values_;
  std::vector<Node> nodes_;
  std::vector<ValueId> outputs_;
};

}  // namespace tessera
