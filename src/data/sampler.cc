#include "data/sampler.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/random.h"
#include "data/permutation.h"

namespace tessera {
namespace {

/// Keys of the random streams of an epoch.
enum class Stream : uint64_t { kOrder = 1, kOffset = 2 };

/// Key of the order in which several datasets are validated.
constexpr uint64_t kMixKey = 1;

uint64_t epoch_key(uint64_t seed, int64_t epoch, Stream stream) {
  return mix(mix(seed, static_cast<uint64_t>(epoch)), static_cast<uint64_t>(stream));
}

const char* split_name(Split split) {
  if (split == Split::kAll) return "evaluation";
  return split == Split::kTrain ? "training" : "validation";
}

/// Where validation begins.
int64_t split_point(const TokenFile& file, double validation_fraction) {
  const int64_t num_tokens = file.num_tokens();
  const double wanted = validation_fraction * static_cast<double>(num_tokens);
  const auto cut = num_tokens - static_cast<int64_t>(std::llround(wanted));
  const auto borders = file.document_offsets();
  int64_t best = cut;
  auto best_distance = static_cast<int64_t>(wanted / 2);
  const auto after = std::ranges::lower_bound(borders, cut);
  const auto consider = [&](int64_t border) {
    const int64_t distance = std::abs(border - cut);
    if (border > 0 && border < num_tokens && distance < best_distance) {
      best = border;
      best_distance = distance;
    }
  };
  if (after != borders.begin()) consider(*std::prev(after));
  if (after != borders.end()) consider(*after);
  return best;
}

void check(const SamplerConfig& config) {
  require(config.sequence_length >= 1, "sequence_length is {}; expected at least 1",
          config.sequence_length);
  require(config.micro_batch_size >= 1, "micro_batch_size is {}; expected at least 1",
          config.micro_batch_size);
  require(config.num_micro_batches >= 1, "the number of micro-batches is {}; expected at least 1",
          config.num_micro_batches);
}

void resize(Batch& batch, int64_t num_tokens, int64_t max_sequences) {
  batch.tokens.resize(num_tokens);
  batch.labels.resize(num_tokens);
  batch.positions.resize(num_tokens);
  batch.cu_seqlens.clear();
  batch.cu_seqlens.reserve(max_sequences + 1);
  batch.cu_seqlens.push_back(0);
  batch.num_valid = 0;
}

}  // namespace

TokenRange split_range(const TokenFile& file, double validation_fraction, Split split) {
  require(validation_fraction >= 0 && validation_fraction < 1,
          "validation_fraction is {}; expected from 0 to below 1", validation_fraction);
  require(file.num_tokens() > 0, "{}.bin holds no tokens", file.prefix());
  const bool whole = split == Split::kAll || (split == Split::kTrain && validation_fraction == 0);
  if (whole) return {0, file.num_tokens()};
  const int64_t cut = split_point(file, validation_fraction);
  const TokenRange range =
      split == Split::kTrain ? TokenRange{0, cut} : TokenRange{cut, file.num_tokens()};
  require(range.num_tokens() > 0,
          "{}.bin: validation_fraction {} of {} tokens leaves none for {}; choose another fraction "
          "or more text",
          file.prefix(), validation_fraction, file.num_tokens(), split_name(split));
  return range;
}

BatchSource::BatchSource(std::shared_ptr<const TokenFile> file, const SamplerConfig& config,
                         Split split)
    : BatchSource(std::vector{std::move(file)}, Blend(), config, split) {}

BatchSource::BatchSource(std::vector<std::shared_ptr<const TokenFile>> files, Blend blend,
                         const SamplerConfig& config, Split split)
    : config_(config), split_(split), blend_(std::move(blend)) {
  check(config_);
  ensure(std::cmp_equal(files.size(), blend_.num_datasets()), "{} files in a blend of {}",
         files.size(), blend_.num_datasets());
  for (auto& file : files) add_dataset(std::move(file));
  num_rows_ = rows_before_.back();
}

void BatchSource::add_dataset(std::shared_ptr<const TokenFile> file) {
  const TokenRange range = split_range(*file, config_.validation_fraction, split_);
  auto rows =
      make_rows(*file, range, config_.sequence_length, config_.packing, config_.split_documents);
  require(rows->num_rows() >= 1,
          "{}.bin: {} has {} tokens, but one sequence takes {} (sequence_length + 1); use more "
          "text or shorter sequences",
          file->prefix(), split_name(split_), range.num_tokens(), config_.sequence_length + 1);
  rows_before_.push_back(rows_before_.back() + rows->num_rows());
  datasets_.push_back({std::move(file), range, std::move(rows)});
}

int64_t BatchSource::max_sequences() const {
  int64_t most = 1;
  for (const Dataset& dataset : datasets_) most = std::max(most, dataset.rows->max_stretches());
  return config_.micro_batch_size * most;
}

int64_t BatchSource::steps_per_epoch() const {
  return (num_rows_ + samples_per_step() - 1) / samples_per_step();
}

const TokenRange& BatchSource::range(int64_t dataset) const {
  return datasets_[dataset].range;
}

int64_t BatchSource::num_tokens() const {
  int64_t total = 0;
  for (const Dataset& dataset : datasets_) total += dataset.range.num_tokens();
  return total;
}

std::vector<int64_t> BatchSource::count_samples(int64_t step) const {
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < num_datasets(); ++i) {
    counts.push_back(blend_.count(i, step * samples_per_step()));
  }
  return counts;
}

std::vector<double> BatchSource::count_epochs(int64_t step) const {
  std::vector<double> epochs;
  for (const int64_t count : count_samples(step)) {
    const auto rows = static_cast<double>(datasets_[epochs.size()].rows->num_rows());
    epochs.push_back(static_cast<double>(count) / rows);
  }
  return epochs;
}

void BatchSource::fetch(int64_t step, int64_t micro_batch, Batch& batch) const {
  ensure(step >= 0 && micro_batch >= 0 && micro_batch < config_.num_micro_batches,
         "micro-batch {} of {} at step {}", micro_batch, config_.num_micro_batches, step);
  const int64_t num_tokens = config_.micro_batch_size * config_.sequence_length;
  const size_t length = config_.sequence_length;
  const int64_t first = (step * config_.num_micro_batches + micro_batch) * config_.micro_batch_size;
  resize(batch, num_tokens, max_sequences());
  std::vector<int32_t> ends;
  for (int64_t row_idx = 0; row_idx < config_.micro_batch_size; ++row_idx) {
    const size_t base = static_cast<size_t>(row_idx) * length;
    const RowView row = {std::span(batch.tokens).subspan(base, length),
                         std::span(batch.labels).subspan(base, length),
                         std::span(batch.positions).subspan(base, length)};
    ends.clear();
    if (split_ == Split::kTrain) {
      fill_training_row(first + row_idx, row, ends);
    } else {
      fill_row_in_order(first + row_idx, row, ends);
    }
    for (const int32_t end : ends) batch.cu_seqlens.push_back(static_cast<int32_t>(base) + end);
    batch.num_valid += static_cast<int64_t>(length) - std::ranges::count(row.labels, kNoLabel);
  }
  batch.cu_seqlens.resize(max_sequences() + 1, static_cast<int32_t>(num_tokens));
}

BatchSource::TrainingRow BatchSource::find_training_row(int64_t sample) const {
  const Draw draw = blend_.at(sample);
  const RowSource& rows = *datasets_[draw.dataset].rows;
  const int64_t epoch = draw.index / rows.num_rows();
  const Permutation order(static_cast<uint64_t>(rows.num_rows()),
                          epoch_key(config_.seed, epoch, Stream::kOrder));
  const auto row_idx = order(static_cast<uint64_t>(draw.index % rows.num_rows()));
  const auto shift =
      epoch_key(config_.seed, epoch, Stream::kOffset) % static_cast<uint64_t>(rows.max_shift() + 1);
  return {rows, static_cast<int64_t>(row_idx), static_cast<int64_t>(shift)};
}

void BatchSource::fill_training_row(int64_t sample, const RowView& row,
                                    std::vector<int32_t>& ends) const {
  const TrainingRow found = find_training_row(sample);
  found.rows.fill(found.row_idx, found.shift, row, ends);
}

void BatchSource::fetch_row(int64_t step, int64_t row, const RowView& view) const {
  std::vector<int32_t> ends;
  fill_training_row(step * samples_per_step() + row, view, ends);
}

std::vector<int32_t> BatchSource::list_documents(int64_t step, int64_t row) const {
  const TrainingRow found = find_training_row(step * samples_per_step() + row);
  return found.rows.list_documents(found.row_idx, found.shift);
}

void BatchSource::fill_row_in_order(int64_t sample, const RowView& row,
                                    std::vector<int32_t>& ends) const {
  int64_t row_idx = sample % num_rows_;
  if (datasets_.size() > 1) {
    const Permutation order(static_cast<uint64_t>(num_rows_), kMixKey);
    row_idx = static_cast<int64_t>(order(static_cast<uint64_t>(row_idx)));
  }
  const auto after = std::ranges::upper_bound(rows_before_, row_idx);
  const size_t dataset = after - rows_before_.begin() - 1;
  datasets_[dataset].rows->fill(row_idx - rows_before_[dataset], 0, row, ends);
  if (sample >= num_rows_) std::ranges::fill(row.labels, kNoLabel);
}

}  // namespace tessera
