#include <algorithm>
#include <cmath>

#include "ops/collective/collective.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"
#include "ops/testing/gpu_ranks.h"
#include "ops/testing/op_test.h"
#include "ops/vocab_loss/vocab_loss.h"

namespace tessera::testing {
namespace {

OwnedTensor random_labels(int64_t tokens, int64_t vocab, Random& random) {
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < tokens; ++t)
    labels.push_back(random.next_below(4) == 0
                         ? kIgnoredLabel
                         : static_cast<int32_t>(random.next_below(static_cast<uint64_t>(vocab))));
  return tensor_of_i32({tokens}, labels);
}

class VocabLossCuda : public GpuTest {
 protected:
  /// Some parts have no logits, but none of a token's first.
  void check_loss(int64_t parts, int64_t tokens, bool once = false, bool weighted = false) const {
    SCOPED_TRACE(fmt::format("{} parts, {} tokens", parts, tokens));
    Random random(static_cast<uint64_t>(parts), static_cast<uint64_t>(tokens));
    const OwnedTensor lse = random_tensor(DType::kF32, {parts * tokens}, random, 3.0);
    for (int64_t i = tokens; i < parts * tokens; ++i) {
      if (random.next_below(3) == 0) lse.get().as<float>()[i] = -INFINITY;
    }
    const OwnedTensor labels = random_labels(tokens, 10, random);
    const OwnedTensor scale = tensor_of({1}, {0.125F});
    GpuCheck how;
    how.values = {{"xlse", lse}, {"labels", labels}, {"scale", scale}};
    how.dtypes = {DType::kF32};
    how.once = once;
    const OwnedTensor weights = random_tensor(DType::kF32, {tokens}, random, 1.5);
    how.values.emplace("token_weights", weights);
    check_operator_on_gpu(
        make_vocab_loss(parts, weighted),
        [&](DType /*dtype*/) {
          OperatorInputs inputs{.names = {"xlse", "xlogit", "labels", "scale"},
                                .types = {{DType::kF32, {parts * tokens}},
                                          {DType::kF32, {parts * tokens}},
                                          {DType::kI32, {tokens}},
                                          {DType::kF32, {1}}}};
          if (weighted) {
            inputs.names.emplace_back("token_weights");
            inputs.types.push_back({DType::kF32, {tokens}});
          }
          return inputs;
        },
        {0}, cpu(), gpu(), how);
  }

  /// A head over tokens and a vocabulary that are spread over ranks.
  void check_spread_head(int64_t ranks, int64_t tokens, int64_t hidden,
                         const std::vector<int64_t>& first_rows) const {
    run_gpu_ranks(ranks, [&](World& world, const Backend& gpu) {
      SCOPED_TRACE(fmt::format("{} ranks, {} tokens of {}", ranks, tokens, hidden));
      const size_t rank = world.rank();
      const CommunicatorPtr group = world.make_world_group();
      const int64_t first = first_rows[rank];
      const int64_t vocab = first_rows.back();
      const auto build = [&](DType dtype) {
        CheckedProgram checked{Program("head"), {}};
        Program& program = checked.program;
        const ValueId x = program.add_input("x", {dtype, {tokens, hidden}});
        const ValueId labels = program.add_input("labels", {DType::kI32, {tokens}});
        const ValueId weight =
            program.add_weight("weight", {dtype, {first_rows[rank + 1] - first, hidden}});
        const ValueId scale = program.add_input("scale", {DType::kF32, {1}});
        const ValueId all_x = program.add1(make_all_gather(group), {x}, "all_x");
        const ValueId all_labels = program.add1(make_all_gather(group), {labels}, "all_labels");
        const auto statistics =
            program.add(make_vocab_lse({.first_row = first, .vocab_size = vocab}),
                        {all_x, weight, all_labels}, {"lse", "label_logit"});
        const ValueId lse = program.add1(make_all_to_all(group), {statistics[0]}, "own_lse");
        const ValueId logit = program.add1(make_all_to_all(group), {statistics[1]}, "own_logit");
        const auto results = program.add(make_vocab_loss(ranks), {lse, logit, labels, scale},
                                         {"loss", "token_loss"});
        program.set_outputs(results);
        checked.request = {{results[0]}, {x}};
        return checked;
      };
      Random random(5, rank);
      const OwnedTensor labels = random_labels(tokens, vocab, random);
      const OwnedTensor scale = tensor_of({1}, {0.125F});
      GpuCheck how;
      how.seed = 1 + rank;
      how.deviation = 0.5;
      how.values = {{"labels", labels}, {"scale", scale}};
      how.tolerance_f32 = 1e-4;
      how.tolerance_bf16 = 1e-2;
      check_on_gpu(build, cpu(), gpu, how);
    });
  }
};

TEST_F(VocabLossCuda, Parts) {
  for (const int64_t parts : {1, 2, 5}) {
    for (const int64_t tokens : {0, 1, 7, 600}) {
      check_loss(parts, tokens);
      check_loss(parts, tokens, false, true);
    }
  }
}

TEST_F(VocabLossCuda, TinyParts) {
  check_loss(3, 270, true);
}

TEST_F(VocabLossCuda, SpreadHead) {
  check_spread_head(1, 5, 16, {0, 60});
  check_spread_head(2, 64, 64, {0, 128, 256});
  check_spread_head(2, 33, 40, {0, 17, 100});
  check_spread_head(3, 20, 64, {0, 0, 90, 200});  // a rank without a part
}

}  // namespace
}  // namespace tessera::testing
