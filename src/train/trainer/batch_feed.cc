#include "train/trainer/batch_feed.h"

#include <exception>
#include <utility>

#include "train/setup/loss_scales.h"

namespace tessera {

/// Counts the batches, and gives them their shape for the model.
void BatchFeed::view(StepBatches& batches) const {
  batches.views.clear();
  batches.num_valid = batches.num_mtp_labels = batches.num_tokens = 0;
  for (Batch& batch : batches.batches) {
    pad_sequences(batch, max_sequences_);
    const int64_t number = layout_.micro_batch(std::ssize(batches.views));
    batches.views.push_back(view_batch(batch, router_noise(settings_, batches.step, number)));
    batches.num_valid += batch.num_valid;
    batches.num_mtp_labels += count_mtp_labels(batches.views.back(), settings_.model.mtp_layers);
    batches.num_tokens += std::ssize(batch.tokens);
  }
}

void BatchFeed::read(int64_t step, StepBatches& to) const {
  to.step = step;
  to.batches.resize(layout_.num_micro_batches);
  for (int64_t i = 0; i < layout_.num_micro_batches; ++i)
    data_.train->fetch(step, layout_.micro_batch(i), to.batches[i]);
  view(to);
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
  thread_.give([this, step, use = std::move(use)] {
    try {
      read(step, next_);
      const int64_t num_batches = layout_.num_micro_batches * layout_.data_ranks();
      use(next_.views, loss_scales(settings_, num_batches, next_.num_valid));
    } catch (const std::exception&) {
      next_.step = -1;  // the step reads anew, and says what is wrong
    }
  });
}

}  // namespace tessera
