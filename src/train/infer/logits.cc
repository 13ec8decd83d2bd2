#include "train/infer/logits.h"

#include "checkpoint/checkpoint.h"
#include "core/nonfinite.h"
#include "model/run/forward_model.h"

namespace tessera {
namespace {

/// Token ids of all sequences, checked against the vocabulary.
std::vector<int32_t> read_ids(const SafetensorsReader& file, const SafetensorsEntry& entry,
                              int64_t vocab_size) {
  const OwnedTensor wide(entry.dtype, entry.shape, "token ids");
  file.read(entry.name, wide);
  std::vector<int32_t> ids;
  for (const int64_t id : wide.get().span<int64_t>()) {
    require(id >= 0 && id < vocab_size, "{}: the token id {} is outside the vocabulary of {}",
            file.path().string(), id, vocab_size);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

void widen(const Tensor& rows, std::vector<float>& into) {
  if (rows.dtype == DType::kF32) {
    into.insert(into.end(), rows.span<float>().begin(), rows.span<float>().end());
  } else {
    into.insert(into.end(), rows.span<Bf16>().begin(), rows.span<Bf16>().end());
  }
}

}  // namespace

void write_logits(LoadedModel& model, const std::filesystem::path& input_ids,
                  const std::filesystem::path& output, bool allow_nonfinite) {
  const SafetensorsReader file(input_ids);
  const SafetensorsEntry& entry = file.entry("input_ids");
  require(entry.dtype == DType::kI64 && entry.shape.rank() == 2 && entry.shape.num_elements() > 0,
          "{}: input_ids is {} {}; expected i64 [sequences, tokens]", input_ids.string(),
          dtype_name(entry.dtype), entry.shape.to_string());
  const ModelConfig& config = model.settings().model;
  const DType dtype = model.settings().train.dtype();
  std::vector<int32_t> ids = read_ids(file, entry, config.vocab_size);
  const int64_t length = entry.shape[1];
  KeyValueCache cache(config, dtype, length, model.backend().device());
  ForwardModel forward(config, {.num_tokens = length, .dtype = dtype}, ForwardGoal::kLogits,
                       model.backend(), model.parameters(), model.experts(), &cache);
  std::vector<float> logits;
  for (size_t first = 0; first < ids.size(); first += length) {
    cache.set_length(0);
    widen(forward.run_logits(std::span(ids).subspan(first, length)), logits);
  }
  const int64_t nonfinite = count_nonfinite(std::as_bytes(std::span(logits)), DType::kF32);
  require(nonfinite == 0 || allow_nonfinite,
          "{} of {} logits are NaN or infinite under {}; --allow-nonfinite writes them as they are",
          nonfinite, logits.size(), model.path().string());
  const Shape shape{entry.shape[0], length, config.vocab_size};
  const NamedTensor result{"logits", view(std::span(logits), shape)};
  write_safetensors(output, std::span(&result, 1));
}

}  // namespace tessera
