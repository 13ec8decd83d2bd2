#include "train/infer/loaded_model.h"

#include <unistd.h>

#include <chrono>
#include <cmath>

#include "core/process/stopwatch.h"
#include "data/sampler.h"
#include "model/config/limits.h"
#include "model/run/forward_model.h"
#include "train/setup/device_choice.h"
#include "train/setup/machine.h"
#include "train/setup/size_check.h"
#include "train/setup/training_data.h"
#include "train/state/checkpointing.h"
#include "train/state/run_paths.h"

namespace tessera {
namespace {

/// Where text becomes tokens: in the run's folder, from which they are taken the next time, or,
/// where this process may not write there or there is no run, in a folder that goes away.
class TokenFolder {
 public:
  explicit TokenFolder(const std::string& run_folder) {
    is_own_ = run_folder.empty() || ::access(run_folder.c_str(), W_OK) != 0;
    path_ = is_own_ ? std::filesystem::temp_directory_path() / unique_name("tessera-tokens-")
                    : std::filesystem::path(run_folder) / "tokens";
  }
  ~TokenFolder() {
    std::error_code ignored;
    if (is_own_) std::filesystem::remove_all(path_, ignored);
  }
  TokenFolder(const TokenFolder&) = delete;
  TokenFolder& operator=(const TokenFolder&) = delete;
  std::string path() const { return path_.string(); }

 private:
  bool is_own_ = false;
  std::filesystem::path path_;
};

/// The token files to evaluate, and which of their splits.
struct EvaluationData {
  std::unique_ptr<TokenFolder> folder = {};  // outlives the files
  std::vector<std::shared_ptr<const TokenFile>> files;
  Blend blend;
  double validation_fraction = 0;
  Split split = Split::kAll;
};

/// The run's own data, whose paths may count from another folder than this process is in.
TrainingData open_held_out(Settings& settings) {
  try {
    return open_training_data(settings);
  } catch (const UserError& error) {
    user_error(
        "{}; this is data of the run: evaluate in the folder that it was started in, or "
        "name what to evaluate with --text or --tokens",
        error.what());
  }
}

EvaluationData open_evaluation_data(const LoadedModel& model, const EvaluationRequest& request) {
  const Settings& settings = model.settings();
  const int64_t vocab_size = settings.model.vocab_size;
  require(request.text.empty() || request.tokens.empty(),
          "give either text or tokens to evaluate, not both");
  const auto open = [vocab_size](const std::string& prefix) {
    return EvaluationData{.files = {std::make_shared<TokenFile>(prefix, vocab_size)}};
  };
  if (!request.tokens.empty()) return open(request.tokens);
  if (!request.text.empty()) {
    TextSource source;
    source.paths = {request.text};
    auto folder = std::make_unique<TokenFolder>(settings.run.folder);
    EvaluationData data = open(prepare_tokens(source, model.tokenizer(), folder->path()).prefix);
    data.folder = std::move(folder);
    return data;
  }
  const DataSettings& own_data = settings.data;
  const bool has_data =
      !own_data.text.empty() || !own_data.tokens.empty() || !own_data.blend.empty();
  require(has_data && own_data.validation_fraction > 0,
          "the run held no data out for validation; name what to evaluate with --text or --tokens");
  Settings own = settings;
  TrainingData data = open_held_out(own);
  return {.files = std::move(data.files),
          .blend = std::move(data.blend),
          .validation_fraction = settings.data.validation_fraction,
          .split = Split::kValidation};
}

void validate(const EvaluationRequest& request) {
  require(request.sequence_length >= 0 && request.sequence_length <= kMaxLength,
          "--sequence-length is {}; it must be 0 (as trained) or above, at most {}",
          request.sequence_length, kMaxLength);
  require(request.batch_size >= 1 && request.batch_size <= kMaxSequences,
          "--batch-size is {}; it must be at least 1 and at most {}", request.batch_size,
          kMaxSequences);
  require(request.max_batches >= 0, "--max-batches is {}; it must be 0 (all) or above",
          request.max_batches);
}

/// Bytes of the text that the predicted tokens stand for.
int64_t count_label_bytes(const Tokenizer& tokenizer, const std::vector<int32_t>& labels) {
  std::vector<int32_t> ids;
  for (const int32_t label : labels) {
    if (label == kNoLabel || label >= tokenizer.vocab_size()) continue;
    if (label != tokenizer.end_of_document()) ids.push_back(label);
  }
  return static_cast<int64_t>(tokenizer.decode_continuation(ids).size());
}

}  // namespace

double Evaluation::perplexity() const {
  return std::exp(loss);
}

double Evaluation::bits_per_byte() const {
  return loss * static_cast<double>(num_tokens) / std::log(2.0) / static_cast<double>(num_bytes);
}

ProductPrecision LoadedModel::products() const {
  return settings_.products();
}

LoadedModel::LoadedModel(const std::string& path, DeviceChoice device, NonFiniteWeights nonfinite) {
  const OpenedCheckpoint opened = open_checkpoint(path);
  describe(opened, device);
  // Of weights in FP8 it has the masters.
  const bool has_masters = settings_.precision.fp8_weights;
  load(opened.reader, has_masters ? Conversion::kFloats : Conversion::kNone, nonfinite);
}

LoadedModel::LoadedModel(const std::string& path, const Settings& of_run) {
  const OpenedCheckpoint opened = open_checkpoint(path);
  describe(opened, of_run.run.device);
  settings_.train.precision = of_run.train.precision;
  settings_.precision = of_run.precision;
  load(opened.reader, Conversion::kFloats, NonFiniteWeights::kRefuse);
}

void LoadedModel::describe(const OpenedCheckpoint& opened, DeviceChoice device) {
  path_ = opened.reader.path();
  step_ = opened.reader.step();
  if (!opened.skipped.empty()) notes_.push_back(describe_skipped(opened.skipped, path_));
  settings_ = checkpoint_settings(opened.reader);
  settings_.run.device = device;
  settings_.run.folder = run_folder_of(path_).string();  // wherever it is now
  const std::string& tokenizer = settings_.data.tokenizer;
  require(tokenizer == "byte" || tokenizer == "none" || path_exists(tokenizer),
          "{}: its tokenizer (data.tokenizer) is {}, which is not there; work in the folder that "
          "the run was started in, or put the tokenizer there",
          path_.string(), tokenizer);
}

void LoadedModel::load(const CheckpointReader& reader, Conversion conversion,
                       NonFiniteWeights nonfinite) {
  take_memory();
  std::vector<NamedTensor> tensors = name_expert_biases(settings_.model, experts_);
  for (const ModelParameter& parameter : parameters_->all()) {
    tensors.push_back({parameter.spec.name, parameter.weight});
  }
  reader.load_group(TensorGroup::kModel, tensors, conversion, is_mtp_parameter);
  if (nonfinite == NonFiniteWeights::kRefuse)
    refuse_nonfinite(reader, "its training diverged; --allow-nonfinite takes it as it is");
  if (!reader.nonfinite().empty()) notes_.push_back(reader.nonfinite().describe());
}

LoadedModel::LoadedModel(Settings settings) : settings_(std::move(settings)) {
  require(settings_.run.init_from.empty(),
          "run.init_from is \"{}\", but a new model has random weights; open that one instead",
          settings_.run.init_from);
  check_device(settings_, 1);
  take_memory();
  parameters_->initialize(static_cast<uint64_t>(settings_.run.seed));
}

/// For the settings' model, without layers of multi-token prediction.
void LoadedModel::take_memory() {
  tokenizer_ = make_tokenizer(settings_.data.tokenizer_spec());
  settings_.model.vocab_size = resolve_vocab_size(settings_.model.vocab_size, *tokenizer_);
  validate(settings_.model);
  settings_.model = without_prediction(std::move(settings_.model));
  auto specs = list_parameters(settings_.model, settings_.train.dtype());
  backend_ = choose_backend(settings_);
  // Weights alone must leave room for what else a model needs.
  require_device_memory(ParameterSet::count_bytes(specs, false).weights, backend_->device(),
                        "the model");
  parameters_ = std::make_unique<ParameterSet>(std::move(specs), /*with_gradients=*/false,
                                               backend_->device());
  experts_ = make_expert_states(settings_.model, backend_->device());
}

Evaluation evaluate(LoadedModel& model, const EvaluationRequest& request) {
  validate(request);
  const auto started = std::chrono::steady_clock::now();
  const Settings& settings = model.settings();
  const EvaluationData data = open_evaluation_data(model, request);
  const int64_t length =
      request.sequence_length > 0 ? request.sequence_length : settings.data.sequence_length;
  SamplerConfig sampler{.sequence_length = length,
                        .micro_batch_size = 1,
                        .validation_fraction = data.validation_fraction,
                        .split_documents = settings.data.split_documents,
                        .packing = settings.data.packing};
  check_batch(settings.model, request.batch_size, length);
  // A batch of more windows than there are would compute padding.
  const int64_t num_windows =
      BatchSource(data.files, data.blend, sampler, data.split).num_windows();
  const int64_t batch_size = std::clamp<int64_t>(num_windows, 1, request.batch_size);
  sampler.micro_batch_size = batch_size;
  const BatchSource source(data.files, data.blend, sampler, data.split);
  const BatchShape shape{.num_tokens = batch_size * length,
                         .max_sequences = source.max_sequences(),
                         .sequence_length = length,
                         .dtype = settings.train.dtype(),
                         .products = model.products()};
  const int64_t working =
      plan_forward(settings.model, shape, ForwardGoal::kLoss, model.backend(), std::nullopt);
  if (model.backend().is_host()) require_host_memory(working, machine_memory(), "evaluation");
  ForwardModel forward(settings.model, shape, ForwardGoal::kLoss, model.backend(),
                       model.parameters(), model.experts());
  int64_t num_batches = (num_windows + batch_size - 1) / batch_size;
  if (request.max_batches > 0) num_batches = std::min(num_batches, request.max_batches);
  Evaluation result;
  Batch batch;
  double total = 0;
  for (int64_t step = 0; step < num_batches; ++step) {
    source.fetch(step, 0, batch);
    for (const float loss : forward.run_loss(view_batch(batch)).span<float>()) {
      total += loss;
      result.nonfinite_tokens += std::isfinite(loss) ? 0 : 1;
    }
    result.num_tokens += batch.num_valid;
    result.num_bytes += count_label_bytes(model.tokenizer(), batch.labels);
  }
  require(result.nonfinite_tokens == 0 || request.allow_nonfinite,
          "the loss of {} of {} tokens is NaN or infinite under {}; --allow-nonfinite counts them",
          result.nonfinite_tokens, result.num_tokens, model.path().string());
  result.loss = total / static_cast<double>(std::max<int64_t>(result.num_tokens, 1));
  result.seconds = seconds_since(started);
  return result;
}

}  // namespace tessera
