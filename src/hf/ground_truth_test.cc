#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <numeric>

#include "hf/ground_truth_testing.h"
#include "model/forward_model.h"
#include "ops/registry/cpu_kernels.h"

namespace tessera::testing {

namespace fs = std::filesystem;

std::vector<fs::path> ground_truth_folders() {
  std::vector<fs::path> roots = {fs::path(TESSERA_TEST_DATA) / "hf"};
  if (const char* more = std::getenv("TESSERA_HF_FIXTURES")) roots.emplace_back(more);
  std::vector<fs::path> folders;
  for (const fs::path& root : roots) {
    for (const auto& entry : fs::directory_iterator(root)) {
      if (fs::exists(entry.path() / "io.safetensors")) folders.push_back(entry.path());
    }
  }
  std::ranges::sort(folders);
  return folders;
}

double RelativeError::value() const {
  if (norm_ > 0) return std::sqrt(difference_ / norm_);
  return difference_ == 0 ? 0 : std::numeric_limits<double>::infinity();
}

void LargestError::take(double error, const std::string& name) {
  if (error <= value) return;  // NaN is taken
  value = error;
  where = name;
}

namespace {

template <typename T>
std::vector<double> widen(const std::byte* bytes, size_t count) {
  std::vector<T> values(count);
  std::memcpy(values.data(), bytes, count * sizeof(T));
  std::vector<double> result(count);
  std::ranges::transform(values, result.begin(), [](T x) {
    if constexpr (std::is_same_v<T, Bf16>)
      return static_cast<double>(static_cast<float>(x));
    else
      return static_cast<double>(x);
  });
  return result;
}

std::vector<double> to_doubles(const std::byte* bytes, DType dtype, size_t count) {
  switch (dtype) {
    case DType::kI64:
      return widen<int64_t>(bytes, count);
    case DType::kF64:
      return widen<double>(bytes, count);
    case DType::kBF16:
      return widen<Bf16>(bytes, count);
    default:
      ensure(dtype == DType::kF32, "ground truth of type {}", dtype_name(dtype));
      return widen<float>(bytes, count);
  }
}

std::vector<double> to_doubles(const Tensor& tensor) {
  return to_doubles(static_cast<const std::byte*>(tensor.data), tensor.dtype,
                    static_cast<size_t>(tensor.num_elements()));
}

std::vector<int32_t> to_ids(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

ModelConfig changed(ModelConfig model, void (*change)(ModelConfig&)) {
  change(model);
  validate(model);
  return model;
}

ImportedConfig changed(ImportedConfig config, void (*change)(ModelConfig&)) {
  config.model = changed(config.model, change);
  return config;
}

BatchShape batch_shape(const Shape& ids, DType dtype) {
  return {.num_tokens = ids.num_elements(),
          .max_sequences = ids[0],
          .sequence_length = ids[1],
          .dtype = dtype};
}

Tensor view_ids(std::vector<int32_t>& ids) {
  return view(std::span(ids), {static_cast<int64_t>(ids.size())});
}

/// Sequences of one length with their next tokens as labels.
struct NextTokenBatch {
  std::vector<int32_t> tokens, labels, positions, cu_seqlens;

  NextTokenBatch(std::span<const int32_t> ids, int64_t length) : tokens(ids.begin(), ids.end()) {
    const auto count = static_cast<int64_t>(ids.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = i % length;
      positions.push_back(static_cast<int32_t>(position));
      labels.push_back(position + 1 == length ? -100 : tokens[static_cast<size_t>(i + 1)]);
      if (position == 0) cu_seqlens.push_back(static_cast<int32_t>(i));
    }
    cu_seqlens.push_back(static_cast<int32_t>(count));
  }
  MicroBatch view() {
    return {view_ids(tokens), view_ids(labels), view_ids(positions), view_ids(cu_seqlens)};
  }
};

}  // namespace

GroundTruth::GroundTruth(const fs::path& folder, void (*change)(ModelConfig&), DType dtype)
    : folder_(folder),
      config_(changed(read_hf_config(folder), change)),
      io_(folder / "io.safetensors"),
      dtype_(dtype),
      parameters_(list_parameters(config_.model, dtype), /*with_gradients=*/true),
      experts_(make_expert_states(config_.model)) {
  const ModelConfig& model = config_.model;
  training_ = std::make_unique<TrainingModel>(model, batch_shape(shape("input_ids"), dtype),
                                              RecomputePolicy{}, make_cpu_kernels());
  training_->bind(parameters_, experts_);
  load_hf_tensors(config_, HfTensors(folder), named(/*gradients=*/false));
  std::vector<Parameter> trained;
  for (const ModelParameter& p : parameters_.all())
    trained.push_back({.name = p.spec.name, .weight = p.weight, .grad = p.grad});
  optimizer_ = std::make_unique<AdamWOptimizer>(
      trained, AdamWOptions{.weight_decay = 0.1, .decay_all = true});
}

std::vector<NamedTensor> GroundTruth::named(bool gradients) const {
  std::vector<NamedTensor> result;
  for (const ModelParameter& p : parameters_.all())
    result.push_back({p.spec.name, gradients ? p.grad : p.weight});
  for (NamedTensor& bias : name_expert_biases(config_.model, experts_))
    result.push_back(std::move(bias));
  return result;
}

std::vector<double> GroundTruth::expected(const std::string& name) const {
  const HfTensor* tensor = io_.find(name);
  ensure(tensor != nullptr, "{} has no tensor {}", io_.path().string(), name);
  return to_doubles(tensor->bytes().data(), tensor->entry->dtype,
                    static_cast<size_t>(tensor->entry->shape.num_elements()));
}

std::vector<double> GroundTruth::logits() {
  const std::vector<int32_t> ids = to_ids(expected("input_ids"));
  KeyValueCache cache(model(), dtype_, length());
  ForwardModel forward(model(), {.num_tokens = length(), .dtype = dtype_}, ForwardGoal::kLogits,
                       parameters_, experts_, &cache);
  std::vector<double> result;
  for (int64_t sequence = 0; sequence < num_sequences(); ++sequence) {
    cache.set_length(0);
    const auto first = static_cast<size_t>(sequence * length());
    const auto rows = to_doubles(
        forward.run_logits(std::span(ids).subspan(first, static_cast<size_t>(length()))));
    const int64_t width = model().vocab_size;
    const int64_t kept = shape("logits")[2];
    for (int64_t row = 0; row < length(); ++row)
      result.insert(result.end(), rows.begin() + row * width, rows.begin() + row * width + kept);
  }
  return result;
}

MicroBatchResult GroundTruth::run(std::span<const int32_t> ids) {
  NextTokenBatch batch(ids, length());
  const auto targets = static_cast<float>(num_sequences() * (length() - 1));
  parameters_.zero_gradients();
  training_->begin_step();
  return training_->run(
      batch.view(),
      {.loss = 1.0F / targets, .balance = static_cast<float>(model().moe.balance_coefficient)});
}

double GroundTruth::total_loss(const MicroBatchResult& result) const {
  if (model().num_moe_layers() == 0) return result.loss;
  return result.loss + model().moe.balance_coefficient * result.balance_loss;
}

std::map<std::string, std::vector<double>> GroundTruth::own_gradients() const {
  std::map<std::string, std::vector<double>> own;
  for (const NamedTensor& tensor : named(/*gradients=*/true)) {
    auto values = to_doubles(tensor.tensor);
    if (tensor.name.ends_with("expert_bias")) std::ranges::fill(values, 0.0);  // no parameter
    own[tensor.name] = std::move(values);
  }
  return own;
}

GradientErrors GroundTruth::compare_gradients() const {
  constexpr double kRounding = 1e-7;  // of FP32
  const HfTensors truth(folder_ / "grads.safetensors");
  const TensorMap map = map_tensors(*config_.family, model(), DType::kF32,
                                    detect_layout(*config_.family, model(), truth));
  const auto own = own_gradients();
  std::vector<RelativeError> errors(map.hf.size());
  RelativeError total;
  for (const TensorLink& link : map.links) {
    const HfTensor& tensor = *truth.find(map.hf[link.hf].name);
    const auto expected = to_doubles(tensor.bytes().data(), tensor.entry->dtype,
                                     static_cast<size_t>(tensor.entry->shape.num_elements()));
    const std::vector<double>& actual = own.at(map.own[link.own].name);
    for (int64_t i = 0; i < link.num_elements(); ++i) {
      const int64_t at = link.transposed ? i % link.cols * link.rows + i / link.cols : i;
      const double a = actual[static_cast<size_t>(link.own_begin + i)];
      const double b = expected[static_cast<size_t>(link.hf_begin + at)];
      errors[link.hf].add(a, b);
      total.add(a, b);
    }
  }
  GradientErrors result;
  for (size_t i = 0; i < errors.size(); ++i) {
    if (errors[i].norm() > 0) result.tensors.push_back(errors[i].value());
    const double rounding = kRounding * total.norm();
    if (errors[i].norm() < rounding && errors[i].difference() < rounding) continue;
    result.largest.take(errors[i].value(), map.hf[i].name);
  }
  return result;
}

std::vector<double> row_errors(const std::vector<double>& actual,
                               const std::vector<double>& expected, int64_t row_size) {
  ensure(actual.size() == expected.size(), "{} elements where {} are expected", actual.size(),
         expected.size());
  std::vector<double> errors;
  const auto width = static_cast<size_t>(row_size);
  for (size_t begin = 0; begin < actual.size(); begin += width) {
    RelativeError error;
    for (size_t i = begin; i < begin + width; ++i) error.add(actual[i], expected[i]);
    errors.push_back(error.value());
  }
  return errors;
}

LargestError largest_of(const std::vector<double>& errors) {
  LargestError largest;
  for (size_t i = 0; i < errors.size(); ++i) largest.take(errors[i], fmt::format("row {}", i));
  return largest;
}

double median_of(std::vector<double> errors) {
  const auto middle = errors.begin() + static_cast<std::ptrdiff_t>(errors.size() / 2);
  std::nth_element(errors.begin(), middle, errors.end());
  return *middle;
}

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

/// Blocks must divide the experts' inner size, and dense models have one path, as has a folder that
/// cannot be read, whose test then fails.
bool applies(const Path& path, const fs::path& folder) {
  if (path.name == kPaths[0].name) return true;
  try {
    const ModelConfig model = read_hf_config(folder).model;
    if (model.num_moe_layers() == 0) return false;
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
/// beyond rounding, but of these few tokens' gradients each a little.
class Bf16Test : public ::testing::TestWithParam<Case> {};

TEST_P(Bf16Test, ErrsNoMoreThanANaiveRun) {
  const Case& c = GetParam();
  const HfTensors naive(c.folder / "bf16.safetensors");
  GroundTruth truth(c.folder, c.path.change, DType::kBF16);
  const auto compare = [&](const std::string& name, const std::vector<double>& errors,
                           double limit) {
    const HfTensor& tensor = *naive.find(name);
    const double ratio =
        median_of(errors) / median_of(to_doubles(tensor.bytes().data(), DType::kF32,
                                                 static_cast<size_t>(tensor.entry->shape[0])));
    EXPECT_LT(ratio, limit) << name;
    std::cout << fmt::format("{} ({}): BF16 error over a naive run's, {}: {:.2f}\n",
                             c.folder.filename().string(), c.path.name, name, ratio);
  };
  compare("logits", row_errors(truth.logits(), truth.expected("logits"), truth.shape("logits")[2]),
          1.1);
  truth.run(to_ids(truth.expected("input_ids")));
  compare("gradients", truth.compare_gradients().tensors, 1.5);
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
