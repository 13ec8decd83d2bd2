#include "train/training_data.h"

namespace tessera {
namespace {

Tensor view_ids(std::vector<int32_t>& ids) {
  return view(std::span(ids), {static_cast<int64_t>(ids.size())});
}

SamplerConfig sampler_config(const Settings& settings) {
  return {.sequence_length = settings.data.sequence_length,
          .micro_batch_size = settings.train.micro_batch,
          .num_micro_batches = settings.train.num_micro_batches(),
          .seed = static_cast<uint64_t>(settings.run.seed),
          .validation_fraction = settings.data.validation_fraction,
          .split_documents = settings.data.split_documents};
}

/// The prefix of the token file: the given one, or one made from text.
std::string find_tokens(const Settings& settings, const Tokenizer& tokenizer,
                        const std::function<void(const PrepareProgress&)>& progress) {
  const DataSettings& data = settings.data;
  if (!data.tokens.empty()) return data.tokens;
  TextSource source{.paths = {data.text}};
  if (!data.separator.empty()) source.separator_line = data.separator;
  const std::string cache = data.cache.empty() ? settings.run.folder + "/tokens" : data.cache;
  return prepare_tokens(source, tokenizer, cache, progress).prefix;
}

}  // namespace

int64_t resolve_vocab_size(int64_t configured, const Tokenizer& tokenizer) {
  constexpr int64_t kMultiple = 64;
  const int64_t needed = tokenizer.vocab_size();
  if (configured == 0) return (needed + kMultiple - 1) / kMultiple * kMultiple;
  require(configured >= needed,
          "model.vocab_size {} is smaller than the {} ids of tokenizer '{}'; 0 takes the right one",
          configured, needed, tokenizer.name());
  return configured;
}

TrainingData open_training_data(Settings& settings,
                                const std::function<void(const PrepareProgress&)>& progress) {
  TrainingData data;
  data.tokenizer = make_tokenizer(settings.data.tokenizer_spec());
  settings.model.vocab_size = resolve_vocab_size(settings.model.vocab_size, *data.tokenizer);
  validate(settings.model);  // before any file is written
  const std::string prefix = find_tokens(settings, *data.tokenizer, progress);
  data.tokens = std::make_shared<TokenFile>(prefix, settings.model.vocab_size);
  const SamplerConfig config = sampler_config(settings);
  data.train = std::make_unique<BatchSource>(data.tokens, config, Split::kTrain);
  if (config.validation_fraction > 0) {
    data.validation = std::make_unique<BatchSource>(data.tokens, config, Split::kValidation);
  }
  return data;
}

MicroBatch view_batch(Batch& batch) {
  return {view_ids(batch.tokens), view_ids(batch.labels), view_ids(batch.positions),
          view_ids(batch.cu_seqlens)};
}

}  // namespace tessera
