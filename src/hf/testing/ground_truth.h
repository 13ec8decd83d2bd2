#pragma once

#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "hf/config/hf_config.h"
#include "hf/load_weights.h"
#include "hf/tensors/hf_tensors.h"
#include "hf/tensors/tensor_map.h"
#include "model/run/training_model.h"
#include "ops/registry/cpu_kernels.h"
#include "optim/optimizer.h"

namespace tessera::testing {

/// The folders of ground truth in tests/data/hf, and in the folder that TESSERA_HF_FIXTURES names.
std::vector<std::filesystem::path> ground_truth_folders();

/// The elements as doubles, of any type that a folder has.
std::vector<double> to_doubles(const std::byte* bytes, DType dtype, size_t count);
std::vector<int32_t> to_ids(const std::vector<double>& values);

/// ‖a − b‖ / ‖b‖ of one tensor: sums to which any number of parts can be added. Where b is all
/// zeros, so must a be.
class RelativeError {
 public:
  void add(double a, double b) {
    difference_ += (a - b) * (a - b);
    norm_ += b * b;
  }
  double value() const;
  double difference() const { return std::sqrt(difference_); }
  double norm() const { return std::sqrt(norm_); }

 private:
  double difference_ = 0;
  double norm_ = 0;
};

/// The largest of several errors and where it is.
struct LargestError {
  double value = 0;
  std::string where;
  void take(double error, const std::string& name);
};

/// How gradients differ from Hugging Face's.
struct GradientErrors {
  LargestError largest;
  std::vector<double> tensors;  ///< of each that is not zero
};

/// Assignments that went to another expert than `expected` has them, at least, of all.
double moved_share(const std::vector<double>& counts, const std::vector<double>& expected);

/// A model of a ground-truth folder with its weights, and what the folder says of it.
class GroundTruth {
 public:
  /// `change` may switch what must not change any result: the experts' implementation, say.
  GroundTruth(const std::filesystem::path& folder, void (*change)(ModelConfig&),
              DType dtype = DType::kF32, const Backend& backend = make_cpu_kernels());

  const ModelConfig& model() const { return config_.model; }
  Optimizer& optimizer() { return *optimizer_; }
  /// Factor from Tessera's balance loss, whose fractions sum to 1, to Hugging Face's.
  double balance_factor() const { return static_cast<double>(model().moe.top_k); }

  /// A tensor of io.safetensors as doubles.
  std::vector<double> expected(const std::string& name) const;
  double expected_scalar(const std::string& name) const { return expected(name).at(0); }
  bool has(const std::string& name) const { return io_.find(name) != nullptr; }
  const Shape& shape(const std::string& name) const { return io_.find(name)->entry->shape; }

  /// Logits of `input_ids` [B, S, V] under the weights as they are now.
  std::vector<double> logits();
  /// Runs one micro-batch of B sequences of S tokens forward and backward; the labels are the next
  /// tokens.
  MicroBatchResult run(std::span<const int32_t> ids);
  /// Assignments to each expert of each layer in the last run.
  std::vector<double> expert_counts() const;
  /// Loss as Hugging Face reports it: the mean over targets plus the weighted balance loss.
  double total_loss(const MicroBatchResult& result) const;
  /// A tensor whose gradient is within FP32's rounding of the whole gradient in both (the router's
  /// where one expert takes a probability of 1) counts as equal.
  GradientErrors compare_gradients() const;

 private:
  std::vector<NamedTensor> named_weights(const ParameterSet& parameters) const;
  /// By Tessera's names.
  std::map<std::string, std::vector<double>> own_gradients() const;
  int64_t num_sequences() const { return shape("input_ids")[0]; }
  int64_t length() const { return shape("input_ids")[1]; }

  std::filesystem::path folder_;
  ImportedConfig config_;
  HfTensors io_;
  DType dtype_;
  Backend backend_;
  ParameterSet parameters_;
  std::vector<ExpertState> experts_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<TrainingModel> training_;
};

/// The relative error of each row of `row_size` elements.
std::vector<double> row_errors(const std::vector<double>& actual,
                               const std::vector<double>& expected, int64_t row_size);
LargestError largest_of(const std::vector<double>& errors);
double median_of(std::vector<double> errors);

}  // namespace tessera::testing
