#include "train/trainer/batch_feed.h"

#include <exception>
#include <utility>

#include "train/setup/loss_scales.h"

namespace tessera {

BatchFeed::BatchFeed(const Settings& settings, const TrainingData& data, const RunLayout& layout,
                     int64_t max_sequences)
    : settings_(settings), data_(data), layout_(layout), max_sequences_(max_sequences) {
  if (!settings.parallel.dynamic_cp) return;
  contexts_.emplace(context_spec(settings, layout.layout, max_sequences), *data.train,
                    layout.part.groups, max_sequences);
}

/// Of micro-batches that several ranks of DP · CP share, the first one counts.
void BatchFeed::count_labels(StepBatches& batches) const {
  batches.num_valid = batches.num_mtp_labels = 0;
  for (size_t i = 0; i < batches.views.size(); ++i) {
    if (!batches.shares.empty() && batches.shares[i].place > 0) continue;
    batches.num_valid += batches.batches[i].num_valid;
    batches.num_mtp_labels += count_mtp_labels(batches.views[i], settings_.model.mtp_layers);
  }
}

/// Counts the batches, and gives them their shape for the model.
void BatchFeed::view(StepBatches& batches) const {
  batches.views.clear();
  batches.num_tokens = 0;
  for (Batch& batch : batches.batches) {
    pad_sequences(batch, max_sequences_);
    const int64_t number = layout_.micro_batch(std::ssize(batches.views));
    batches.views.push_back(view_batch(batch, router_noise(settings_, batches.step, number)));
    batches.num_tokens += std::ssize(batch.tokens);
  }
  for (size_t i = 0; i < batches.shares.size(); ++i) batches.views[i].context = &batches.shares[i];
  count_labels(batches);
}

/// The step's rows are as many tokens as in any layout, whatever fills micro-batches.
void BatchFeed::read_contexts(int64_t step, StepBatches& to) const {
  to.batches.clear();
  to.shares.clear();
  for (ContextBatch& own : contexts_->read(step)) {
    to.batches.push_back(std::move(own.batch));
    to.shares.push_back(std::move(own.share));
  }
  view(to);
  to.num_tokens =
      settings_.train.global_batch * settings_.data.sequence_length / layout_.data_ranks();
}

void BatchFeed::read(int64_t step, StepBatches& to) const {
  to.step = step;
  if (contexts_) return read_contexts(step, to);
  to.batches.resize(layout_.num_micro_batches);
  for (int64_t i = 0; i < layout_.num_micro_batches; ++i)
    data_.train->fetch(step, layout_.micro_batch(i), to.batches[i]);
  view(to);
}

int64_t BatchFeed::count_batches(int64_t step) {
  thread_.wait();
  if (!contexts_) return layout_.num_micro_batches;
  if (next_.step == step) return std::ssize(next_.batches);
  return contexts_->plan(step).num_micro_batches();
}

const StepBatches& BatchFeed::begin(int64_t step, std::vector<Batch> given) {
  thread_.wait();
  is_given_ = !given.empty();
  ensure(is_given_ || data_.train != nullptr, "a step without data was given no batches");
  began_with_read_ = !is_given_ && next_.step == step;
  if (is_given_) {
    current_.step = step;
    current_.batches = std::move(given);
    view(current_);
  } else if (began_with_read_) {
    std::swap(current_, next_);
  } else {
    read(step, current_);
  }
  next_.step = -1;
  return current_;
}

void BatchFeed::read_ahead(Use use) {
  const int64_t step = current_.step + 1;
  if (is_given_ || step >= settings_.train.steps) return;
  thread_.give([this, step, use = std::move(use), factor = loss_scale_] {
    try {
      read(step, next_);
      const int64_t num_batches = count_loss_parts(settings_, std::ssize(next_.batches), layout_);
      use(next_.views, loss_scales(settings_, num_batches, next_.num_valid).times(factor));
    } catch (const std::exception&) {
      next_.step = -1;  // the step reads anew, and says what is wrong
    }
  });
}

}  // namespace tessera
