#include "train/setup/training_data.h"

#include <algorithm>

#include "core/random.h"
#include "train/setup/blend_settings.h"
#include "train/setup/run_layout.h"

namespace tessera {
namespace {

Tensor view_ids(std::vector<int32_t>& ids) {
  return view(std::span(ids), {static_cast<int64_t>(ids.size())});
}

Tensor view_weights(Batch& batch) {
  if (batch.weights.empty()) return {};
  return view(std::span(batch.weights), {std::ssize(batch.weights)});
}

/// The layers and choices of a token are for the model to tell apart.
Tensor view_experts(Batch& batch) {
  if (batch.experts.empty()) return {};
  return view(std::span(batch.experts), {std::ssize(batch.experts)});
}

SamplerConfig sampler_config(const Settings& settings) {
  return {.sequence_length = settings.data.sequence_length,
          .micro_batch_size = settings.train.micro_batch,
          .num_micro_batches = settings.train.num_micro_batches(),
          .seed = static_cast<uint64_t>(settings.run.seed),
          .validation_fraction = settings.data.validation_fraction,
          .split_documents = settings.data.split_documents,
          .packing = settings.data.packing};
}

/// The prefix of the token file: the given one, or one made from text.
std::string find_tokens(const Settings& settings, const Tokenizer& tokenizer,
                        const std::function<void(const PrepareProgress&)>& progress,
                        const std::function<void()>& pause) {
  const DataSettings& data = settings.data;
  if (!data.tokens.empty()) return data.tokens;
  const std::string cache = data.cache.empty() ? settings.run.folder + "/tokens" : data.cache;
  const TextSource source = make_text_source(data);
  refuse_output_within(source, settings.run.folder, "run.folder");
  if (!data.cache.empty()) refuse_output_within(source, cache, "data.cache");
  return prepare_tokens(source, tokenizer, cache, progress, pause).prefix;
}

void open_files(const Settings& settings, TrainingData& data,
                const std::function<void(const PrepareProgress&)>& progress,
                const std::function<void()>& pause) {
  std::vector<std::string> prefixes;
  if (settings.data.blend.empty()) {
    prefixes = {find_tokens(settings, *data.tokenizer, progress, pause)};
  } else {
    const BlendPlan plan = parse_blend(settings.data.blend, settings.data.blend_changes);
    prefixes = plan.prefixes;
    data.blend = plan.make_blend(settings.train.global_batch);
  }
  for (const std::string& prefix : prefixes) {
    data.files.push_back(std::make_shared<TokenFile>(prefix, settings.model.vocab_size));
  }
}

}  // namespace

TextSource make_text_source(const DataSettings& data) {
  TextSource source;
  source.paths = {data.text};
  source.format = data.format;
  source.json_key = data.json_key;
  source.instructions = data.instructions;
  if (!data.separator.empty()) source.separator_line = data.separator;
  return source;
}

int64_t resolve_vocab_size(int64_t configured, const Tokenizer& tokenizer) {
  constexpr int64_t kMultiple = 64;
  const int64_t needed = tokenizer.vocab_size();
  if (configured == 0) return (needed + kMultiple - 1) / kMultiple * kMultiple;
  require(configured >= needed,
          "model.vocab_size {} is smaller than the {} ids of tokenizer '{}'; 0 takes the right one",
          configured, needed, tokenizer.name());
  return configured;
}

int64_t TrainingData::max_sequences() const {
  int64_t most = given_sequences;
  for (const BatchSource* source : {train.get(), validation.get()}) {
    if (source != nullptr) most = std::max(most, source->max_sequences());
  }
  return most;
}

int64_t TrainingData::num_tokens() const {
  int64_t total = 0;
  for (const auto& file : files) total += file->num_tokens();
  return total;
}

int64_t TrainingData::num_documents() const {
  int64_t total = 0;
  for (const auto& file : files) total += file->num_documents();
  return total;
}

uint64_t TrainingData::fingerprint() const {
  uint64_t all = 0;
  for (const auto& file : files) all = mix(all, file->fingerprint());
  return all;
}

std::string TrainingData::describe_samples(int64_t step) const {
  const std::vector<int64_t> samples = train->count_samples(step);
  const std::vector<double> epochs = train->count_epochs(step);
  std::string text;
  for (size_t i = 0; i < files.size(); ++i) {
    text += fmt::format("{}{}: {} samples, {:.3g} epochs", i > 0 ? "; " : "", files[i]->prefix(),
                        samples[i], epochs[i]);
  }
  return text;
}

TrainingData prepare_without_data(Settings& settings) {
  TrainingData data;
  data.tokenizer = make_tokenizer(settings.data.tokenizer_spec());
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size, *data.tokenizer);
  validate(settings.model);
  const TrainSettings& train = settings.train;
  const int64_t most = train.micro_batch * settings.data.sequence_length;
  data.given_sequences = settings.data.split_documents ? most : train.micro_batch;
  // Of all answers, and of each row's padding.
  if (settings.packs_answers())
    data.given_sequences = std::min(most, train.global_batch + train.micro_batch);
  return data;
}

TrainingData open_training_data(Settings& settings,
                                const std::function<void(const PrepareProgress&)>& progress,
                                const std::function<void()>& pause) {
  TrainingData data;
  data.tokenizer = make_tokenizer(settings.data.tokenizer_spec());
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size, *data.tokenizer);
  validate(settings.model);  // before any file is written
  open_files(settings, data, progress, pause);
  const SamplerConfig config = sampler_config(settings);
  data.train = std::make_unique<BatchSource>(data.files, data.blend, config, Split::kTrain);
  if (config.validation_fraction > 0) {
    data.validation =
        std::make_unique<BatchSource>(data.files, data.blend, config, Split::kValidation);
  }
  return data;
}

void pad_sequences(Batch& batch, int64_t max_sequences) {
  batch.cu_seqlens.resize(max_sequences + 1, static_cast<int32_t>(batch.tokens.size()));
}

void check_given_batches(const std::vector<Batch>& batches, int64_t fewest, int64_t most,
                         const BatchShape& shape) {
  const auto count = std::ssize(batches);
  require(count >= fewest && count <= most, "a step takes {}{} micro-batches, found {}",
          fewest < most ? fmt::format("{} to ", fewest) : "", most, count);
  for (const Batch& batch : batches) {
    require(std::ssize(batch.tokens) == shape.num_tokens,
            "a micro-batch has {} tokens, by train.micro_batch and data.sequence_length; found {}",
            shape.num_tokens, batch.tokens.size());
    require(std::ssize(batch.cu_seqlens) <= shape.max_sequences + 1,
            "a micro-batch has at most {} stretches, found {}; data.split_documents = true allows "
            "more",
            shape.max_sequences, std::ssize(batch.cu_seqlens) - 1);
    require(batch.weights.empty() ||
                (shape.weighted_tokens && std::ssize(batch.weights) == shape.num_tokens),
            "a micro-batch has {} weights of tokens; it must have {} with train.objective other "
            "than \"next_token\", and none with that",
            batch.weights.size(), shape.num_tokens);
    require(batch.experts.empty() || shape.replays_routing,
            "a micro-batch names its tokens' experts, but the model was not built to be told "
            "(rl.router_replay)");
  }
}

RouterNoise router_noise(const Settings& settings, int64_t step, int64_t micro_batch) {
  constexpr uint64_t kStream = 0x6a6974746572;
  const uint64_t of_run = mix(static_cast<uint64_t>(settings.run.seed), kStream);
  return {.training = true,
          .key = mix(of_run, static_cast<uint64_t>(step)),
          .first_token = micro_batch * batch_shape(settings).num_tokens};
}

MicroBatch view_batch(Batch& batch, const RouterNoise& noise) {
  return {view_ids(batch.tokens),
          view_ids(batch.labels),
          view_ids(batch.positions),
          view_ids(batch.cu_seqlens),
          view_weights(batch),
          view_experts(batch),
          noise};
}

}  // namespace tessera
