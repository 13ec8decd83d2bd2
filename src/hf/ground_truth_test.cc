#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>

#include "hf/testing/ground_truth.h"

namespace tessera::testing {

namespace fs = std::filesystem;

namespace {

constexpr double kTolerance = 1e-4;

/// A way to compute the same model.
struct Path {
  const char* name;
  void (*change)(ModelConfig&);
};

constexpr Path kPaths[] = {
    {"grouped", [](ModelConfig&) {}},
    {"weighted_after", [](ModelConfig& c) { c.moe.memory_efficient = false; }},
    {"block_sparse",
     [](ModelConfig& c) {
       c.moe.experts = ExpertPath::kBlockSparse;
       c.moe.block_size = 8;
     }},
};

struct Case {
  fs::path folder;
  Path path;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.folder.filename().string() << " " << c.path.name;
}

/// Blocks must divide the experts' inner size, and there are none where probabilities multiply
/// inputs, wherever they would be applied else; dense models have one path, as has a folder that
/// cannot be read, whose test then fails.
bool applies(const Path& path, const fs::path& folder) {
  if (path.name == kPaths[0].name) return true;
  try {
    const ModelConfig model = read_hf_config(folder).model;
    if (model.num_moe_layers() == 0 || model.moe.probs_on_input) return false;
    return path.name != kPaths[2].name || model.moe.inner_size % 8 == 0;
  } catch (const UserError&) {
    return false;
  }
}

std::vector<Case> list_cases() {
  std::vector<Case> cases;
  for (const fs::path& folder : ground_truth_folders()) {
    for (const Path& path : kPaths) {
      if (applies(path, folder)) cases.push_back({folder, path});
    }
  }
  return cases;
}

class GroundTruthTest : public ::testing::TestWithParam<Case> {
 protected:
  /// Checks an error against the tolerance, and keeps it for the line that the test prints.
  void check(const std::string& what, const LargestError& error) {
    EXPECT_LT(error.value, kTolerance) << what << ": " << error.where;
    EXPECT_FALSE(std::isnan(error.value)) << what;
    line_ += fmt::format("  {} {:.1e}", what, error.value);
  }
  void check(const std::string& what, double actual, double expected) {
    check(what, {std::abs(actual - expected) / std::abs(expected), fmt::format("{}", actual)});
  }
  void TearDown() override {
    std::cout << fmt::format("{} ({}):{}\n", GetParam().folder.filename().string(),
                             GetParam().path.name, line_);
  }

  GroundTruth truth_{GetParam().folder, GetParam().path.change};
  std::string line_;
};

TEST_P(GroundTruthTest, LogitsLossesAndGradients) {
  const int64_t vocab_size = truth_.shape("logits")[2];
  check("logits", largest_of(row_errors(truth_.logits(), truth_.expected("logits"), vocab_size)));
  const MicroBatchResult result = truth_.run(to_ids(truth_.expected("input_ids")));
  check("loss", truth_.total_loss(result), truth_.expected_scalar("loss"));
  if (truth_.has("aux_loss") && truth_.model().moe.balance_scope == BalanceTokens::kModel) {
    check("balance", result.balance_loss * truth_.balance_factor(),
          truth_.expected_scalar("aux_loss"));
  }
  check("gradients", truth_.compare_gradients().largest);
}

TEST_P(GroundTruthTest, TwelveAdamWSteps) {
  const std::vector<int32_t> ids = to_ids(truth_.expected("traj_input_ids"));
  const auto rates = truth_.expected("traj_lr");
  const auto losses = truth_.expected("traj_loss");
  const auto norms = truth_.expected("traj_grad_norm");
  const size_t batch = ids.size() / rates.size();
  LargestError loss_error;
  LargestError norm_error;
  for (size_t step = 0; step < rates.size(); ++step) {
    const MicroBatchResult result = truth_.run(std::span(ids).subspan(step * batch, batch));
    const StepResult update = truth_.optimizer().step(
        {.step_idx = static_cast<int64_t>(step), .lr = rates[step], .max_grad_norm = 1.0});
    const std::string where = fmt::format("step {}", step);
    loss_error.take(std::abs(truth_.total_loss(result) - losses[step]) / losses[step], where);
    norm_error.take(std::abs(update.grad_norm - norms[step]) / norms[step], where);
  }
  check("losses", loss_error);
  check("norms", norm_error);
  check("final logits", largest_of(row_errors(truth_.logits(), truth_.expected("traj_final_logits"),
                                              truth_.shape("logits")[2])));
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return fmt::format("{}_{}_{}", info.index, info.param.folder.filename().string(),
                     info.param.path.name);
}

/// The errors against FP32 are at most those of PyTorch's plain BF16 run. Medians, since a token
/// whose experts are nearly tied may go elsewhere in either run, which changes its own logits
/// beyond rounding. Which do depends on the processor. All gradients move with one that does, and
/// where that is more than one assignment of a hundred, as it can be in a tiny batch, through
/// attention the logits behind it too; they are only bounded then.
class Bf16Test : public ::testing::TestWithParam<Case> {};

TEST_P(Bf16Test, ErrsNoMoreThanANaiveRun) {
  const Case& c = GetParam();
  const HfTensors naive(c.folder / "bf16.safetensors");
  GroundTruth truth(c.folder, c.path.change, DType::kBF16);
  GroundTruth exact(c.folder, c.path.change);
  const std::vector<double> logit_errors =
      row_errors(truth.logits(), truth.expected("logits"), truth.shape("logits")[2]);
  const std::vector<int32_t> ids = to_ids(truth.expected("input_ids"));
  truth.run(ids);
  exact.run(ids);
  const double moved = moved_share(truth.expert_counts(), exact.expert_counts());
  const bool is_alike = moved < 0.01;
  const auto compare = [&](const std::string& name, const std::vector<double>& errors,
                           double limit) {
    const HfTensor& tensor = *naive.find(name);
    const double ratio =
        median_of(errors) / median_of(to_doubles(tensor.bytes().data(), DType::kF32,
                                                 static_cast<size_t>(tensor.entry->shape[0])));
    EXPECT_LT(ratio, limit) << name;
    std::cout << fmt::format(
        "{} ({}): BF16 error over a naive run's, {}: {:.2f}; {:.2f} % of the assignments moved\n",
        c.folder.filename().string(), c.path.name, name, ratio, 100 * moved);
  };
  EXPECT_LT(moved, 0.02);
  compare("logits", logit_errors, is_alike ? 1.1 : 2);
  compare("gradients", truth.compare_gradients().tensors, moved == 0 ? 1.5 : is_alike ? 5 : 15);
}

std::vector<Case> list_bf16_cases() {
  std::vector<Case> cases = list_cases();
  std::erase_if(cases, [](const Case& c) { return !fs::exists(c.folder / "bf16.safetensors"); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, Bf16Test, ::testing::ValuesIn(list_bf16_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(All, GroundTruthTest, ::testing::ValuesIn(list_cases()), case_name);

}  // namespace
}  // namespace tessera::testing
