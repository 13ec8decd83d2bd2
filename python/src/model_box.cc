#include "model_box.h"

#include <cstdint>

#include "checkpoint/checkpoint.h"
#include "train/setup/machine.h"
#include "train/setup/size_check.h"
#include "train/setup/training_data.h"
#include "train/state/checkpointing.h"

namespace tessera::python {
namespace {

ModelParts parts_of(LoadedModel& model) {
  return {.config = model.settings().model,
          .settings = model.settings(),
          .backend = model.backend(),
          .parameters = model.parameters(),
          .experts = model.experts(),
          .tokenizer = model.tokenizer()};
}

void append_f32(const Tensor& rows, std::vector<float>& into) {
  if (rows.dtype == DType::kF32) {
    into.insert(into.end(), rows.span<float>().begin(), rows.span<float>().end());
  } else {
    into.insert(into.end(), rows.span<Bf16>().begin(), rows.span<Bf16>().end());
  }
}

}  // namespace

ModelBox::ModelBox(std::unique_ptr<LoadedModel> own)
    : own_(std::move(own)), parts_(parts_of(*own_)), turns_(own_turns_), settle_([] {}) {}

ModelBox::ModelBox(const ModelParts& parts, Turns& turns, std::function<void()> settle)
    : parts_(parts), turns_(turns), settle_(std::move(settle)) {}

std::vector<float> ModelBox::score(const TokenRows& rows) {
  settle();
  Batch batch = make_batch(rows, 0, rows.tokens.num_rows);
  check_batch(parts_.config, rows.tokens.num_rows, rows.tokens.length);
  const int64_t num_tokens = std::ssize(batch.tokens);
  const int64_t num_sequences = std::ssize(batch.cu_seqlens) - 1;
  if (scorer_.num_tokens != num_tokens || scorer_.max_sequences != num_sequences) {
    scorer_.model.reset();  // its memory is free for the next
    const BatchShape shape{.num_tokens = num_tokens,
                           .max_sequences = num_sequences,
                           .sequence_length = rows.tokens.length,
                           .dtype = parts_.settings.train.dtype(),
                           .products = parts_.settings.products()};
    const int64_t working =
        plan_forward(parts_.config, shape, ForwardGoal::kLoss, parts_.backend, std::nullopt);
    if (parts_.backend.is_host()) require_host_memory(working, machine_memory(), "this batch");
    scorer_ = {num_tokens, num_sequences,
               std::make_unique<ForwardModel>(parts_.config, shape, ForwardGoal::kLoss,
                                              parts_.backend, parts_.parameters, parts_.experts)};
  }
  const auto losses = scorer_.model->run_loss(view_batch(batch)).span<float>();
  return {losses.begin(), losses.end()};
}

std::vector<float> ModelBox::logits(const Rows& tokens) {
  settle();
  check_batch(parts_.config, 1, tokens.length);
  const int64_t bytes = int64_t{sizeof(float)} * parts_.config.vocab_size;
  const bool countable = tokens.num_rows * tokens.length <= INT64_MAX / bytes;
  require_host_memory(countable ? tokens.num_rows * tokens.length * bytes : INT64_MAX,
                      machine_memory(), "this batch's logits");
  const DType dtype = parts_.settings.train.dtype();
  KeyValueCache cache(parts_.config, dtype, tokens.length, parts_.backend.device());
  ForwardModel forward(parts_.config, {.num_tokens = tokens.length, .dtype = dtype},
                       ForwardGoal::kLogits, parts_.backend, parts_.parameters, parts_.experts,
                       &cache);
  std::vector<float> all;
  for (int64_t row = 0; row < tokens.num_rows; ++row) {
    cache.set_length(0);
    append_f32(forward.run_logits(tokens.row(row)), all);
  }
  return all;
}

std::string ModelBox::save(const std::string& root) const {
  settle();
  std::vector<NamedTensor> tensors = name_expert_biases(parts_.config, parts_.experts);
  for (const ModelParameter& parameter : parts_.parameters.all()) {
    if (!is_mtp_parameter(parameter.spec.name))
      tensors.push_back({parameter.spec.name, parameter.weight});
  }
  Settings settings = parts_.settings;
  settings.model = parts_.config;
  const SaveRequest request{.model = tensors,
                            .state = fresh_state(make_schema(settings).to_toml())};
  return save_checkpoint(root, request).path.string();
}

}  // namespace tessera::python
