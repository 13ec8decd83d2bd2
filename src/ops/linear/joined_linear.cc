#include "ops/linear/joined_linear.h"

#include <utility>

#include "ops/addend.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

void check_count(int count) {
  ensure(count >= 2 && count <= JoinedLinear::kMost, "{} products are joined, not 2 to {}", count,
         JoinedLinear::kMost);
}

void check_not_ragged(const Operator& op, std::span<const ValueType> inputs) {
  for (const ValueType& input : inputs)
    check_shape(op, !input.ragged(), "takes no ragged inputs, got {}", input.to_string());
}

}  // namespace

JoinedLinear::JoinedLinear(int count) : count_(count) {
  check_count(count);
}

std::string JoinedLinear::attributes() const {
  return fmt::format("{} products", count_);
}

std::vector<ValueType> JoinedLinear::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, std::ssize(inputs) == count_ + 1, "takes {} inputs, got {}", count_ + 1,
              inputs.size());
  check_not_ragged(*this, inputs);
  std::vector<ValueType> results;
  for (int i = 0; i < count_; ++i) {
    const ValueType one[] = {inputs[kX], inputs[kFirstWeight + i]};
    results.push_back(make_linear()->infer(one).front());
  }
  return results;
}

Cost JoinedLinear::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  for (const ValueType& y : outputs)
    cost.flops += 2.0 * static_cast<double>(inputs[kX].shape.num_elements()) *
                  static_cast<double>(y.shape[1]);
  return cost;
}

JoinedLinearDgrad::JoinedLinearDgrad(int count, bool addend) : count_(count), addend_(addend) {
  check_count(count);
}

std::string JoinedLinearDgrad::attributes() const {
  return fmt::format("{} products{}", count_, addend_ ? ", addend" : "");
}

std::vector<ValueType> JoinedLinearDgrad::infer(std::span<const ValueType> inputs) const {
  const int expected = 2 * count_ + (addend_ ? 1 : 0);
  check_shape(*this, std::ssize(inputs) == expected, "takes {} inputs, got {}", expected,
              inputs.size());
  check_not_ragged(*this, inputs);
  const ValueType grad_x = LinearDgrad().infer(inputs.first(2)).front();
  for (int i = 1; i < count_; ++i) {
    const ValueType own = LinearDgrad().infer(inputs.subspan(2 * i, 2)).front();
    check_shape(*this, own == grad_x, "the products are {} and {}, and cannot be added",
                grad_x.to_string(), own.to_string());
  }
  if (addend_) check_addend(*this, inputs[2 * count_], grad_x);
  return {grad_x};
}

Cost JoinedLinearDgrad::cost(std::span<const ValueType> inputs,
                             std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  for (int i = 0; i < count_; ++i)
    cost.flops += 2.0 * static_cast<double>(inputs[2 * i].shape.num_elements()) *
                  static_cast<double>(outputs[kGradX].shape[1]);
  return cost;
}

JoinedLinearWgrad::JoinedLinearWgrad(int count) : count_(count) {
  check_count(count);
}

std::string JoinedLinearWgrad::attributes() const {
  return fmt::format("{} products", count_);
}

std::vector<ValueType> JoinedLinearWgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, std::ssize(inputs) == count_ + 1, "takes {} inputs, got {}", count_ + 1,
              inputs.size());
  check_not_ragged(*this, inputs);
  std::vector<ValueType> results;
  for (int i = 0; i < count_; ++i) {
    const ValueType one[] = {inputs[kX], inputs[kFirstGrad + i]};
    results.push_back(LinearWgrad().infer(one).front());
  }
  return results;
}

Cost JoinedLinearWgrad::cost(std::span<const ValueType> inputs,
                             std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  for (const ValueType& grad : inputs.subspan(kFirstGrad))
    cost.flops += 2.0 * static_cast<double>(inputs[kX].shape.num_elements()) *
                  static_cast<double>(grad.shape[1]);
  return cost;
}

int64_t count_joined_tiles(int64_t num_rows, std::span<const int64_t> features) {
  int64_t tiles = 0;
  for (const int64_t count : features) tiles += (count + 63) / 64;
  return (num_rows + 127) / 128 * tiles;
}

bool suits_joined_kernel(int64_t num_tiles) {
  constexpr int64_t kMostTiles = 264;
  return num_tiles <= kMostTiles;
}

}  // namespace tessera
