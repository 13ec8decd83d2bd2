#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "ops/backend.h"
#include "ops/expert_activation/activated_product.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/op_test.h"

/// Products with an activation beside the two operators that they stand for, on one back end.
namespace tessera::testing {

struct ActivatedCase {
  std::vector<int64_t> sizes;    ///< F of each expert
  std::vector<int64_t> rows_of;  ///< of each expert
  int64_t wide = 64;             ///< H
  int64_t slack = 0;             ///< rows behind the last expert's, which hold NaN; on a GPU alone
  Activation kind = Activation::kSwiGLU;
  bool apply_prob = true;
  int64_t top_k = 0;  ///< of the gather that is part of the product; 0: there is none
  DType dtype = DType::kBF16;

  int64_t num_rows() const {
    return std::accumulate(rows_of.begin(), rows_of.end(), int64_t{0}) + slack;
  }
  std::string to_string() const {
    return fmt::format("{} {} F {} rows {} + {} H {}{} top_k {}", dtype_name(dtype),
                       activation_name(kind), sizes, rows_of, slack, wide,
                       apply_prob ? " apply_prob" : "", top_k);
  }
};

/// A case's inputs in a back end's memory, and the operators on them.
class ActivatedRig {
 public:
  ActivatedRig(const ActivatedCase& test, uint64_t seed, const Backend& backend)
      : test_(test),
        backend_(backend),
        random_(seed, 3),
        activation_(
            {.function = test.kind, .expert_sizes = test.sizes, .apply_prob = test.apply_prob}),
        fc1_({.group_sizes = fc1_sizes(), .gather = test.top_k > 0}),
        fc2_({.group_sizes = test.sizes}) {
    std::vector<int64_t> ends{0};
    for (const int64_t count : test.rows_of) ends.push_back(ends.back() + count);
    offsets_ = give(tensor_of_i64({std::ssize(ends)}, ends));
    if (test.apply_prob) probs_.push_back(give(random_rows(1, {test.num_rows()}, DType::kF32)));
    if (test.top_k > 0) make_maps();
  }

  /// FC1 and the activation, and the pre-activation where it is wanted: the same bits.
  void check_forward() {
    const int64_t num_given = test_.top_k > 0 ? num_tokens() : test_.num_rows();
    std::vector<Tensor> product = {
        give(random_rows(test_.wide, {num_given, test_.wide}, test_.dtype, test_.top_k > 0)),
        random_weight(fc1_.sizes().total()), offsets_};
    product.insert(product.end(), maps_.begin(), maps_.end());
    const Tensor pre = run(fc1_, product)[0];
    const Tensor act = run(activation_, with_probs({pre}))[0];
    const std::vector<Tensor> fused = with_probs(product);
    for (const bool keeps : {true, false}) {
      const auto made = run(ActivatedProduct(fc1_, activation_, keeps), fused);
      expect_same(made[0], act, "act");
      if (keeps) expect_same(made[1], pre, "pre");
    }
  }

  /// The gradients before FC2 and before the activation, and the activation: the same bits except
  /// for the probabilities', which differ by at most tolerance · sqrt(H).
  void check_backward(double tolerance) {
    const Tensor grad = give(random_rows(test_.wide, {test_.num_rows(), test_.wide}, test_.dtype));
    const int64_t width = activation_.pre_width();
    const Tensor pre = give(random_rows(width, {test_.num_rows(), width}, test_.dtype));
    const std::vector<Tensor> product = {grad, random_weight(fc2_.sizes().total()), offsets_};
    const Tensor grad_act = run(fc2_, product)[0];
    const auto grads = run(ExpertActivationBackward(activation_), with_probs({grad_act, pre}));
    const Tensor act = run(activation_, with_probs({pre}))[0];
    std::vector<Tensor> fused = product;
    const auto behind = with_probs({pre});
    fused.insert(fused.end(), behind.begin(), behind.end());
    for (const bool gives_act : {true, false}) {
      const auto made = run(ActivationGradProduct(fc2_, activation_, gives_act), fused);
      expect_same(made[0], grads[0], "gradient of pre");
      if (test_.apply_prob)
        expect_near(made[1], grads[1], tolerance * std::sqrt(static_cast<double>(test_.wide)));
      if (gives_act) expect_same(made.back(), act, "act again");
    }
  }

 private:
  static constexpr float kGuard = -7;

  std::vector<int64_t> fc1_sizes() const {
    std::vector<int64_t> sizes = test_.sizes;
    for (int64_t& size : sizes) size *= is_gated(test_.kind) ? 2 : 1;
    return sizes;
  }
  int64_t num_tokens() const { return (test_.num_rows() + test_.top_k - 1) / test_.top_k; }

  Tensor give(const Tensor& host) {
    kept_.push_back(copy_to(backend_, host));
    return kept_.back();
  }

  /// Random rows of `width`; those of the slack are NaN unless `all` are used.
  OwnedTensor random_rows(int64_t width, const Shape& shape, DType dtype, bool all = false) {
    const OwnedTensor values = random_tensor(DType::kF32, shape, random_);
    const std::span<float> numbers = values.get().span<float>();
    if (!all) {
      const size_t used = (test_.num_rows() - test_.slack) * width;
      std::ranges::fill(numbers.subspan(used), std::numeric_limits<float>::quiet_NaN());
    }
    return tensor_of(shape, {numbers.begin(), numbers.end()}, dtype);
  }
  Tensor random_weight(int64_t num_rows) {
    return give(random_tensor(test_.dtype, {num_rows, test_.wide}, random_,
                              1 / std::sqrt(static_cast<double>(test_.wide))));
  }

  /// Rows of tokens in a random order, some of them none.
  void make_maps() {
    std::vector<int32_t> source(test_.num_rows());
    std::iota(source.begin(), source.end(), 0);
    for (size_t i = source.size(); i > 1; --i)
      std::swap(source[i - 1], source[random_.next_below(i)]);
    for (size_t i = 0; i < source.size(); i += 7) source[i] = -1;
    maps_.push_back(give(tensor_of_i32({test_.num_rows()}, source)));
    const std::vector<int32_t> row_of(num_tokens() * test_.top_k, 0);
    maps_.push_back(give(tensor_of_i32({num_tokens(), test_.top_k}, row_of)));
  }

  std::vector<Tensor> with_probs(std::vector<Tensor> inputs) const {
    inputs.insert(inputs.end(), probs_.begin(), probs_.end());
    inputs.push_back(offsets_);
    return inputs;
  }

  /// What the operator's kernel makes; it starts as guards, which what is not written keeps.
  std::vector<Tensor> run(const Operator& op, const std::vector<Tensor>& inputs) {
    std::vector<ValueType> types;
    for (const Tensor& input : inputs)
      types.push_back({.dtype = input.dtype, .shape = input.shape});
    std::vector<Tensor> outputs;
    for (const ValueType& type : op.infer(types)) {
      const std::vector<float> guards(type.shape.num_elements(), kGuard);
      outputs.push_back(give(tensor_of(type.shape, guards, type.dtype)));
    }
    run_kernel(op, backend_, inputs, outputs);
    return outputs;
  }

  void expect_same(const Tensor& made, const Tensor& expected, std::string_view what) const {
    const auto a = to_doubles(copy_to_host(backend_, made));
    const auto b = to_doubles(copy_to_host(backend_, expected));
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
      FAIL() << what << " at row " << static_cast<int64_t>(i) / made.shape[1] << ", column "
             << static_cast<int64_t>(i) % made.shape[1] << ": " << a[i] << " is not " << b[i];
    }
  }
  void expect_near(const Tensor& made, const Tensor& expected, double tolerance) const {
    const auto a = to_doubles(copy_to_host(backend_, made));
    const auto b = to_doubles(copy_to_host(backend_, expected));
    for (size_t i = 0; i < a.size(); ++i)
      ASSERT_NEAR(a[i], b[i], tolerance) << "gradient of the probability of row " << i;
  }

  ActivatedCase test_;
  const Backend& backend_;
  Random random_;
  ExpertActivation activation_;
  GroupedMatmul fc1_;
  GroupedMatmul fc2_;
  std::vector<OwnedTensor> kept_;
  Tensor offsets_;
  std::vector<Tensor> probs_;
  std::vector<Tensor> maps_;
};

inline void check_activated(const ActivatedCase& test, uint64_t seed, const Backend& backend,
                            double tolerance) {
  SCOPED_TRACE(test.to_string());
  ActivatedRig rig(test, seed, backend);
  rig.check_forward();
  if (test.top_k == 0) rig.check_backward(tolerance);
}

}  // namespace tessera::testing
