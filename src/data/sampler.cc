#include "data/sampler.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

/// Keys of the random streams of an epoch.
enum class Stream : uint64_t { kOrder = 1, kOffset = 2 };

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

/// The most stretches that a window of `length` tokens can be cut into by the borders of documents.
int64_t most_stretches(std::span<const int64_t> offsets, int64_t length) {
  std::vector<int64_t> borders(offsets.begin() + 1, offsets.end());
  std::erase(borders, 0);
  std::erase(borders, offsets.back());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  // Borders b with begin < b < begin + length cut the window: a run of them spans at most length
  // - 2.
  int64_t most = 1;
  for (size_t first = 0, last = 0; last < borders.size(); ++last) {
    while (borders[last] - borders[first] > length - 2 && first < last) ++first;
    if (length >= 2) most = std::max(most, static_cast<int64_t>(last - first) + 2);
  }
  return most;
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
  const auto size = static_cast<size_t>(num_tokens);
  batch.tokens.resize(size);
  batch.labels.resize(size);
  batch.positions.resize(size);
  batch.cu_seqlens.clear();
  batch.cu_seqlens.reserve(static_cast<size_t>(max_sequences) + 1);
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
    : file_(std::move(file)), config_(config), split_(split) {
  check(config_);
  range_ = split_range(*file_, config_.validation_fraction, split);
  num_windows_ = (range_.num_tokens() - 1) / config_.sequence_length;
  require(num_windows_ >= 1,
          "{}.bin: {} has {} tokens, but one sequence takes {} (sequence_length + 1); use more "
          "text or shorter sequences",
          file_->prefix(), split_name(split), range_.num_tokens(), config_.sequence_length + 1);
  if (config_.split_documents) {
    max_stretches_ = most_stretches(file_->document_offsets(), config_.sequence_length);
  }
}

int64_t BatchSource::steps_per_epoch() const {
  const int64_t windows_per_step = config_.micro_batch_size * config_.num_micro_batches;
  return (num_windows_ + windows_per_step - 1) / windows_per_step;
}

int64_t BatchSource::window_begin(int64_t sample) const {
  const int64_t within = sample % num_windows_;
  if (split_ != Split::kTrain) return range_.begin + within * config_.sequence_length;
  const int64_t epoch = sample / num_windows_;
  const Permutation order(static_cast<uint64_t>(num_windows_),
                          epoch_key(config_.seed, epoch, Stream::kOrder));
  const auto window = static_cast<int64_t>(order(static_cast<uint64_t>(within)));
  const int64_t spare = range_.num_tokens() - 1 - num_windows_ * config_.sequence_length;
  const auto offset = static_cast<int64_t>(epoch_key(config_.seed, epoch, Stream::kOffset) %
                                           static_cast<uint64_t>(spare + 1));
  return range_.begin + offset + window * config_.sequence_length;
}

void BatchSource::fetch(int64_t step, int64_t micro_batch, Batch& batch) const {
  ensure(step >= 0 && micro_batch >= 0 && micro_batch < config_.num_micro_batches,
         "micro-batch {} of {} at step {}", micro_batch, config_.num_micro_batches, step);
  const int64_t num_tokens = config_.micro_batch_size * config_.sequence_length;
  const int64_t first = (step * config_.num_micro_batches + micro_batch) * config_.micro_batch_size;
  resize(batch, num_tokens, max_sequences());
  std::vector<int32_t> ids(static_cast<size_t>(config_.sequence_length) + 1);
  for (int64_t row = 0; row < config_.micro_batch_size; ++row) {
    fill_window(first + row, row, ids, batch);
  }
  batch.cu_seqlens.resize(static_cast<size_t>(max_sequences()) + 1,
                          static_cast<int32_t>(num_tokens));
}

/// The borders of documents strictly inside the window that begins there, as offsets in it.
std::vector<int64_t> BatchSource::inner_borders(int64_t begin) const {
  if (!config_.split_documents) return {};
  const auto offsets = file_->document_offsets();
  std::vector<int64_t> borders;
  for (auto at = std::ranges::upper_bound(offsets, begin);
       at != offsets.end() && *at < begin + config_.sequence_length; ++at) {
    if (borders.empty() || borders.back() != *at - begin) borders.push_back(*at - begin);
  }
  return borders;
}

void BatchSource::fill_window(int64_t sample, int64_t row, std::vector<int32_t>& ids,
                              Batch& batch) const {
  const int64_t length = config_.sequence_length;
  const int64_t begin = window_begin(sample);
  const int64_t base = row * length;
  file_->read(begin, ids);
  std::copy_n(ids.begin(), length, batch.tokens.begin() + base);
  std::copy_n(ids.begin() + 1, length, batch.labels.begin() + base);
  std::vector<int64_t> ends = inner_borders(begin);
  const bool last_is_border = config_.split_documents &&
                              std::ranges::binary_search(file_->document_offsets(), begin + length);
  for (const int64_t border : ends) batch.labels[base + border - 1] = kNoLabel;
  if (last_is_border) batch.labels[base + length - 1] = kNoLabel;
  ends.push_back(length);
  int64_t start = 0;
  for (const int64_t end : ends) {
    for (int64_t i = start; i < end; ++i)
      batch.positions[base + i] = static_cast<int32_t>(i - start);
    batch.cu_seqlens.push_back(static_cast<int32_t>(base + end));
    start = end;
  }
  const auto labels = batch.labels.begin() + base;
  if (split_ != Split::kTrain && sample >= num_windows_) std::fill_n(labels, length, kNoLabel);
  batch.num_valid += length - std::count(labels, labels + length, kNoLabel);
}

}  // namespace tessera
