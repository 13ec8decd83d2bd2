#include "hf/testing/ground_truth.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/host_tensor.h"
#include "hf/tensors/prediction_layers.h"
#include "hf/testing.h"
#include "model/run/forward_model.h"
#include "ops/registry/cpu_kernels.h"

namespace tessera::testing {

namespace fs = std::filesystem;

std::vector<fs::path> ground_truth_folders() {
  std::vector<fs::path> folders;
  for (const fs::path& root : hf_fixture_roots()) {
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

}  // namespace

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

std::vector<int32_t> to_ids(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

namespace {

std::vector<double> to_doubles(const Tensor& tensor) {
  const HostTensor host(tensor, HostTensor::Access::kRead);
  return testing::to_doubles(static_cast<const std::byte*>(host.get().data), tensor.dtype,
                             static_cast<size_t>(tensor.num_elements()));
}

ModelConfig changed(ModelConfig model, void (*change)(ModelConfig&)) {
  change(model);
  validate(model);
  return model;
}

ImportedConfig changed_config(const fs::path& folder, void (*change)(ModelConfig&)) {
  ImportedConfig config = read_hf_config(folder);
  take_predictions(config, HfTensors(folder));
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
      labels.push_back(position + 1 == length ? -100 : tokens[i + 1]);
      if (position == 0) cu_seqlens.push_back(static_cast<int32_t>(i));
    }
    cu_seqlens.push_back(static_cast<int32_t>(count));
  }
  MicroBatch view() {
    return {view_ids(tokens), view_ids(labels), view_ids(positions), view_ids(cu_seqlens)};
  }
};

}  // namespace

double moved_share(const std::vector<double>& counts, const std::vector<double>& expected) {
  double moved = 0;
  for (size_t i = 0; i < counts.size(); ++i) moved += std::abs(counts[i] - expected[i]) / 2;
  return moved / std::max(1.0, std::accumulate(expected.begin(), expected.end(), 0.0));
}

/// Norms of 1 + weight, which the truth does not decay: Tessera keeps the sum.
bool is_centred_norm(const Family& family, const std::string& name) {
  return family.gated_delta && name.ends_with("norm.weight") &&
         !name.ends_with("delta.norm.weight");
}

GroundTruth::GroundTruth(const fs::path& folder, void (*change)(ModelConfig&), DType dtype,
                         const Backend& backend)
    : folder_(folder),
      config_(changed_config(folder, change)),
      io_(folder / "io.safetensors"),
      dtype_(dtype),
      backend_(backend),
      parameters_(list_parameters(config_.model, dtype), /*with_gradients=*/true, backend.device()),
      experts_(make_expert_states(config_.model, backend.device())) {
  const ModelConfig& model = config_.model;
  training_ = std::make_unique<TrainingModel>(model, batch_shape(shape("input_ids"), dtype),
                                              SavedPolicy{}, backend);
  training_->bind(parameters_, experts_);
  const ParameterSet loaded(list_parameters(config_.model, dtype), /*with_gradients=*/false);
  load_hf_tensors(config_, HfTensors(folder), named_weights(loaded));
  copy_weights(loaded, parameters_);
  std::vector<Parameter> trained;
  for (const ModelParameter& p : parameters_.all()) {
    if (p.is_frozen()) continue;
    trained.push_back({.name = p.spec.name, .weight = p.weight, .grad = p.grad});
    if (is_centred_norm(*config_.family, p.spec.name)) trained.back().decay = false;
  }
  optimizer_ = std::make_unique<Optimizer>(
      trained, OptimizerOptions{.weight_decay = 0.1, .decay_all = true}, backend);
}

std::vector<NamedTensor> GroundTruth::named_weights(const ParameterSet& parameters) const {
  std::vector<NamedTensor> result;
  for (const ModelParameter& p : parameters.all()) result.push_back({p.spec.name, p.weight});
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
  KeyValueCache cache(model(), dtype_, length(), backend_.device());
  ForwardModel forward(model(), {.num_tokens = length(), .dtype = dtype_}, ForwardGoal::kLogits,
                       backend_, parameters_, experts_, &cache);
  std::vector<double> result;
  for (int64_t sequence = 0; sequence < num_sequences(); ++sequence) {
    cache.set_length(0);
    const size_t first = sequence * length();
    const auto rows = to_doubles(forward.run_logits(std::span(ids).subspan(first, length())));
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
  const auto depths = static_cast<double>(std::max<int64_t>(model().mtp_layers, 1));
  return training_->run(
      batch.view(), {.loss = 1.0F / targets,
                     .balance = static_cast<float>(model().moe.balance_coefficient),
                     .mtp = static_cast<float>(model().mtp_loss_coefficient / depths) / targets});
}

std::vector<double> GroundTruth::expert_counts() const {
  std::vector<double> counts;
  for (const ExpertState& expert : experts_) {
    const auto layer = expert.step_counts.get().span<float>();
    counts.insert(counts.end(), layer.begin(), layer.end());
  }
  return counts;
}

double GroundTruth::total_loss(const MicroBatchResult& result) const {
  const double loss = result.loss + result.mtp_loss;
  if (model().num_moe_layers() == 0) return loss;
  return loss + model().moe.balance_coefficient * result.balance_loss;
}

std::map<std::string, std::vector<double>> GroundTruth::own_gradients() const {
  std::map<std::string, std::vector<double>> own;
  for (const ModelParameter& p : parameters_.all()) {
    own[p.spec.name] =
        p.is_frozen() ? std::vector<double>(p.spec.shape.num_elements()) : to_doubles(p.grad);
  }
  for (const NamedTensor& bias : name_expert_biases(config_.model, experts_))  // no parameters
    own[bias.name].assign(bias.tensor.num_elements(), 0.0);
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
      const double a = actual[link.own_begin + i];
      const double b = expected[link.hf_begin + link.hf_index(i)];
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
  const size_t width = row_size;
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

}  // namespace tessera::testing
