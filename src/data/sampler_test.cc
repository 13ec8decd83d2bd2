#include "data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/random.h"
#include "data/token_file_writer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SamplerTest : public ::testing::Test {
 protected:
  SamplerTest() : folder_(fs::path(testing::TempDir()) / unique_name("sampler_test-")) {}
  ~SamplerTest() override { fs::remove_all(folder_); }

  /// A file of documents of those lengths whose token i is first + i, so that ids tell where they
  /// come from.
  std::shared_ptr<const TokenFile> make_file(const std::vector<int64_t>& lengths,
                                             int32_t first = 0) {
    const std::string prefix = (folder_ / std::to_string(num_files_++)).string();
    constexpr int64_t kVocab = 1 << 20;
    TokenFileWriter writer(prefix, kVocab);
    int32_t next = first;
    for (const int64_t length : lengths) {
      std::vector<int32_t> ids(length);
      std::iota(ids.begin(), ids.end(), next);
      next += static_cast<int32_t>(length);
      writer.append(ids);
      writer.end_document();
    }
    writer.finish();
    return std::make_shared<const TokenFile>(prefix, kVocab);
  }

  /// A file of random documents whose token i is 1 + i, and which of its tokens carry loss.
  std::pair<std::shared_ptr<const TokenFile>, std::vector<bool>> make_silent_file(Random& random) {
    const std::string prefix = (folder_ / std::to_string(num_files_++)).string();
    TokenFileWriter writer({.prefix = prefix, .vocab_size = 1 << 20, .with_modes = true});
    std::vector<bool> has_loss;
    for (int part = 0; part < 40; ++part) {
      std::vector<int32_t> ids(random.next_below(9));
      std::iota(ids.begin(), ids.end(), static_cast<int32_t>(has_loss.size()) + 1);
      const bool loss = random.next_below(2) == 0;
      writer.append(ids, loss);
      has_loss.insert(has_loss.end(), ids.size(), loss);
      if (random.next_below(3) == 0) writer.end_document();
    }
    std::vector<int32_t> last(20);
    std::iota(last.begin(), last.end(), static_cast<int32_t>(has_loss.size()) + 1);
    writer.append(last, true);
    has_loss.insert(has_loss.end(), last.size(), true);
    writer.end_document();
    writer.finish();
    return {std::make_shared<const TokenFile>(prefix, 1 << 20), has_loss};
  }

  /// Stretches, positions and labels of packed rows against the documents.
  static void check_packed(const BatchSource& source, const TokenFile& file,
                           const SamplerConfig& config) {
    Batch batch;
    for (int64_t step = 0; step < source.num_windows(); ++step) {
      source.fetch(step, 0, batch);
      ASSERT_EQ(batch.cu_seqlens.size(), static_cast<size_t>(source.max_sequences()) + 1);
      ASSERT_EQ(batch.cu_seqlens.back(), config.sequence_length);
      const std::set<int32_t> borders(batch.cu_seqlens.begin(), batch.cu_seqlens.end());
      for (int64_t i = 0; i < config.sequence_length; ++i) {
        const int64_t offset = batch.tokens[i] - 1;  // -1: padding
        const int64_t previous = i > 0 ? batch.tokens[i - 1] - 1 : -2;
        const bool follows =
            i > 0 && (offset < 0 ? previous < 0
                                 : offset == previous + 1 &&
                                       file.document_at(offset) == file.document_at(previous));
        const bool starts = i == 0 || (config.split_documents && !follows);
        EXPECT_EQ(borders.contains(static_cast<int32_t>(i)), starts);
        EXPECT_EQ(batch.positions[i], starts ? 0 : batch.positions[i - 1] + 1);
        const bool has_next = offset >= 0 && offset + 1 < file.num_tokens() &&
                              file.document_at(offset) == file.document_at(offset + 1);
        const bool joined = !config.split_documents && i + 1 < config.sequence_length &&
                            offset >= 0 && batch.tokens[i + 1] > 0;
        const auto next = joined ? batch.tokens[i + 1] : kNoLabel;
        EXPECT_EQ(batch.labels[i], has_next ? offset + 2 : next);
      }
    }
  }

 private:
  fs::path folder_;
  int num_files_ = 0;
};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

bool same(const Batch& a, const Batch& b) {
  return a.tokens == b.tokens && a.labels == b.labels && a.positions == b.positions &&
         a.cu_seqlens == b.cu_seqlens && a.num_valid == b.num_valid;
}

/// The first tokens of the windows of samples [first, first + count).
std::vector<int32_t> window_starts(const BatchSource& source, const SamplerConfig& config,
                                   int64_t num_steps) {
  std::vector<int32_t> starts;
  Batch batch;
  for (int64_t step = 0; step < num_steps; ++step) {
    for (int64_t micro = 0; micro < config.num_micro_batches; ++micro) {
      source.fetch(step, micro, batch);
      for (int64_t row = 0; row < config.micro_batch_size; ++row) {
        starts.push_back(batch.tokens[row * config.sequence_length]);
      }
    }
  }
  return starts;
}

TEST_F(SamplerTest, WindowsAreContiguousAndLabelsAreTheNextTokens) {
  const SamplerConfig config = {.sequence_length = 7, .micro_batch_size = 3, .seed = 1};
  const BatchSource source(make_file({50, 0, 31, 20}), config, Split::kTrain);
  EXPECT_EQ(source.max_sequences(), 3);
  Batch batch;
  for (int64_t step = 0; step < 30; ++step) {
    source.fetch(step, 0, batch);
    ASSERT_EQ(batch.tokens.size(), 21);
    EXPECT_THAT(batch.cu_seqlens, ElementsAre(0, 7, 14, 21));
    EXPECT_EQ(batch.num_valid, 21);
    for (size_t i = 0; i < 21; ++i) {
      EXPECT_EQ(batch.labels[i], batch.tokens[i] + 1);
      EXPECT_EQ(batch.positions[i], i % 7);
      EXPECT_EQ(batch.tokens[i], batch.tokens[i / 7 * 7] + static_cast<int32_t>(i % 7));
      EXPECT_LT(batch.labels[i], 101);
    }
  }
}

TEST_F(SamplerTest, EachEpochVisitsEachWindowOnce) {
  const SamplerConfig config = {
      .sequence_length = 4, .micro_batch_size = 2, .num_micro_batches = 3, .seed = 9};
  const BatchSource source(make_file({100}), config, Split::kTrain);
  ASSERT_EQ(source.num_windows(), 24);
  EXPECT_EQ(source.steps_per_epoch(), 4);
  const auto starts = window_starts(source, config, 12);
  std::set<std::vector<int32_t>> orders;
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::vector<int32_t> order(starts.begin() + epoch * 24, starts.begin() + (epoch + 1) * 24);
    std::vector<int32_t> sorted = order;
    std::ranges::sort(sorted);
    EXPECT_LE(sorted[0], 3);
    for (int i = 0; i < 24; ++i) EXPECT_EQ(sorted[i], sorted[0] + 4 * i);
    EXPECT_NE(order, sorted);
    for (int32_t& start : order) start -= sorted[0];
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 3);
}

TEST_F(SamplerTest, FetchIsAPureFunctionOfStepAndMicroBatch) {
  const auto file = make_file({33, 5, 5, 80});
  SamplerConfig config = {.sequence_length = 6,
                          .micro_batch_size = 2,
                          .num_micro_batches = 2,
                          .seed = 3,
                          .split_documents = true};
  const BatchSource first(file, config, Split::kTrain);
  const BatchSource second(file, config, Split::kTrain);
  std::map<std::pair<int64_t, int64_t>, Batch> batches;
  for (int64_t step = 0; step < 40; ++step) {
    for (int64_t micro : {0, 1}) first.fetch(step, micro, batches[{step, micro}]);
  }
  Batch batch;
  for (auto at = batches.rbegin(); at != batches.rend(); ++at) {
    second.fetch(at->first.first, at->first.second, batch);
    EXPECT_TRUE(same(batch, at->second));
  }
  config.seed = 4;
  const BatchSource other(file, config, Split::kTrain);
  EXPECT_NE(window_starts(first, config, 10), window_starts(other, config, 10));
}

TEST_F(SamplerTest, DocumentsAreKeptApart) {
  Random random(11, 0);
  for (int round = 0; round < 30; ++round) {
    std::vector<int64_t> lengths(1 + random.next_below(20));
    for (int64_t& length : lengths) length = static_cast<int64_t>(random.next_below(9));
    lengths.push_back(30);
    const auto file = make_file(lengths);
    const SamplerConfig config = {.sequence_length = 1 + static_cast<int64_t>(random.next_below(9)),
                                  .micro_batch_size = 2,
                                  .seed = 5,
                                  .split_documents = true};
    const BatchSource source(file, config, Split::kTrain);
    Batch batch;
    for (int64_t step = 0; step < 10; ++step) {
      source.fetch(step, 0, batch);
      const int64_t num_tokens = 2 * config.sequence_length;
      ASSERT_EQ(batch.cu_seqlens.size(), static_cast<size_t>(source.max_sequences()) + 1);
      ASSERT_TRUE(std::ranges::is_sorted(batch.cu_seqlens));
      ASSERT_EQ(batch.cu_seqlens.back(), num_tokens);
      const std::set<int32_t> borders(batch.cu_seqlens.begin(), batch.cu_seqlens.end());
      int64_t num_valid = 0;
      for (int64_t i = 0; i < num_tokens; ++i) {
        const int32_t token = batch.tokens[i];
        const bool starts_row = i % config.sequence_length == 0;
        const bool starts = starts_row || file->document_at(token) != file->document_at(token - 1);
        EXPECT_EQ(borders.contains(static_cast<int32_t>(i)), starts);
        EXPECT_EQ(batch.positions[i], starts ? 0 : batch.positions[i - 1] + 1);
        const bool has_next = token + 1 < file->num_tokens() &&
                              file->document_at(token) == file->document_at(token + 1);
        EXPECT_EQ(batch.labels[i], has_next ? token + 1 : kNoLabel);
        num_valid += has_next ? 1 : 0;
      }
      EXPECT_EQ(batch.num_valid, num_valid);
    }
  }
}

TEST_F(SamplerTest, SplitsAreDisjointAndAtDocumentBorders) {
  const auto file = make_file({100, 100, 100, 80, 20, 0});
  const TokenRange train = split_range(*file, 0.06, Split::kTrain);
  const TokenRange validation = split_range(*file, 0.06, Split::kValidation);
  EXPECT_EQ(train.begin, 0);
  EXPECT_EQ(train.end, 380);
  EXPECT_EQ(validation.begin, 380);
  EXPECT_EQ(validation.end, 400);
  EXPECT_EQ(split_range(*file, 0.0, Split::kTrain).end, 400);
  EXPECT_EQ(split_range(*file, 0.5, Split::kTrain).end, 200);
}

TEST_F(SamplerTest, OneLargeDocumentIsCutInside) {
  const auto file = make_file({1000});
  EXPECT_EQ(split_range(*file, 0.1, Split::kTrain).end, 900);
  EXPECT_EQ(split_range(*file, 0.1, Split::kValidation).begin, 900);
  const SamplerConfig config = {
      .sequence_length = 9, .micro_batch_size = 1, .validation_fraction = 0.1};
  const BatchSource train(file, config, Split::kTrain);
  const BatchSource validation(file, config, Split::kValidation);
  Batch batch;
  for (int64_t step = 0; step < 3 * train.steps_per_epoch(); ++step) {
    train.fetch(step, 0, batch);
    EXPECT_LT(*std::ranges::max_element(batch.labels), 900);
    validation.fetch(step % validation.steps_per_epoch(), 0, batch);
    EXPECT_GE(batch.tokens[0], 900);
  }
}

TEST_F(SamplerTest, ValidationCountsEachWindowOnceInOrder) {
  const auto file = make_file({90, 60});
  const SamplerConfig config = {
      .sequence_length = 5, .micro_batch_size = 4, .seed = 2, .validation_fraction = 0.4};
  const BatchSource source(file, config, Split::kValidation);
  ASSERT_EQ(source.range().begin, 90);
  ASSERT_EQ(source.num_windows(), 11);
  ASSERT_EQ(source.steps_per_epoch(), 3);
  std::vector<int32_t> labels;
  Batch batch;
  for (int64_t step = 0; step < 3; ++step) {
    source.fetch(step, 0, batch);
    int64_t num_valid = 0;
    for (const int32_t label : batch.labels) {
      if (label == kNoLabel) continue;
      labels.push_back(label);
      ++num_valid;
    }
    EXPECT_EQ(batch.num_valid, num_valid);
  }
  std::vector<int32_t> expected(55);
  std::iota(expected.begin(), expected.end(), 91);
  EXPECT_EQ(labels, expected);
}

TEST_F(SamplerTest, TheWholeFileIsReadInOrder) {
  const SamplerConfig config = {
      .sequence_length = 4, .micro_batch_size = 1, .validation_fraction = 0.5};
  const BatchSource source(make_file({7, 6}), config, Split::kAll);
  EXPECT_EQ(source.range().num_tokens(), 13);
  EXPECT_EQ(window_starts(source, config, source.steps_per_epoch()),
            (std::vector<int32_t>{0, 4, 8}));
}

TEST_F(SamplerTest, OneWindowIsEnough) {
  const SamplerConfig config = {.sequence_length = 9, .micro_batch_size = 2};
  const BatchSource source(make_file({10}), config, Split::kTrain);
  Batch batch;
  source.fetch(1'000'000'000'000, 0, batch);
  EXPECT_EQ(batch.tokens[0], 0);
  EXPECT_EQ(batch.tokens[9], 0);
}

/// All tokens that a source's rows show in this many steps, and how often each is a label.
struct Seen {
  std::map<int32_t, int> tokens;
  std::map<int32_t, int> labels;
};

Seen watch(const BatchSource& source, const SamplerConfig& config, int64_t num_steps) {
  Seen seen;
  Batch batch;
  for (int64_t step = 0; step < num_steps; ++step) {
    for (int64_t micro = 0; micro < config.num_micro_batches; ++micro) {
      source.fetch(step, micro, batch);
      for (size_t i = 0; i < batch.tokens.size(); ++i) {
        const bool padding = batch.tokens[i] == 0;  // real ids begin at 1 in these tests
        if (!padding) ++seen.tokens[batch.tokens[i]];
        if (batch.labels[i] != kNoLabel) ++seen.labels[batch.labels[i]];
      }
    }
  }
  return seen;
}

TEST_F(SamplerTest, PackedRowsHoldEachDocumentOnceAnEpoch) {
  Random random(21, 0);
  for (int round = 0; round < 40; ++round) {
    std::vector<int64_t> lengths(1 + random.next_below(30));
    for (int64_t& length : lengths) length = static_cast<int64_t>(random.next_below(25));
    lengths.push_back(3);
    const auto file = make_file(lengths, 1);
    const SamplerConfig config = {
        .sequence_length = 1 + static_cast<int64_t>(random.next_below(30)),
        .micro_batch_size = 1,
        .seed = 5,
        .split_documents = round % 2 == 0,
        .packing = Packing::kBestFit};
    const BatchSource source(file, config, Split::kTrain);
    const Seen seen = watch(source, config, 3 * source.num_windows());
    ASSERT_EQ(static_cast<int64_t>(seen.tokens.size()), file->num_tokens());
    for (const auto& [token, count] : seen.tokens) EXPECT_EQ(count, 3) << token;
    for (const auto& [label, count] : seen.labels) {
      const int64_t offset = label - 1;
      const bool starts = offset == 0 || file->document_at(offset) != file->document_at(offset - 1);
      // Across documents, a label may also be the first token behind another document.
      EXPECT_TRUE(config.split_documents ? !starts && count == 3 : starts || count >= 3) << label;
    }
    check_packed(source, *file, config);
  }
}

TEST_F(SamplerTest, SilentTokensAreNoLabels) {
  Random random(22, 0);
  for (int round = 0; round < 40; ++round) {
    const auto [file, has_loss] = make_silent_file(random);
    const SamplerConfig config = {
        .sequence_length = 1 + static_cast<int64_t>(random.next_below(12)),
        .micro_batch_size = 2,
        .seed = 5,
        .split_documents = round % 2 == 0,
        .packing = round % 4 < 2 ? Packing::kBestFit : Packing::kStream};
    const BatchSource source(file, config, Split::kTrain);
    Batch batch;
    for (int64_t step = 0; step < 20; ++step) {
      source.fetch(step, 0, batch);
      int64_t num_valid = 0;
      for (size_t i = 0; i < batch.labels.size(); ++i) {
        if (batch.labels[i] == kNoLabel) continue;
        ++num_valid;
        ASSERT_TRUE(has_loss[batch.labels[i] - 1]);
      }
      EXPECT_EQ(batch.num_valid, num_valid);
    }
    // Nothing else is taken away: each token with loss that follows one of its document is learned.
    if (config.packing != Packing::kBestFit) continue;
    const Seen seen = watch(source, config, 2 * source.num_windows());
    for (int64_t offset = 1; offset < file->num_tokens(); ++offset) {
      if (!has_loss[offset]) continue;
      if (file->document_at(offset) != file->document_at(offset - 1)) continue;
      EXPECT_GT(seen.labels.count(static_cast<int32_t>(offset + 1)), 0) << offset;
    }
  }
}

/// Blends of random files: counts as the blend says, each dataset through its own epochs, any step
/// alone as in an unbroken run, and a change that leaves no sample out and shows none twice.
TEST_F(SamplerTest, BlendsDrawEachDatasetInItsOwnEpochs) {
  Random random(23, 0);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<const TokenFile>> files;
    std::vector<double> first;
    std::vector<double> second;
    constexpr int32_t kIdsPerFile = 10'000;
    for (uint64_t i = 0; i <= random.next_below(4); ++i) {
      const auto length = static_cast<int64_t>(20 + random.next_below(300));
      files.push_back(make_file({length, 7}, 1 + kIdsPerFile * static_cast<int32_t>(i)));
      first.push_back(static_cast<double>(1 + random.next_below(9)));
      second.push_back(static_cast<double>(random.next_below(4)));
    }
    second.back() += 1;
    const SamplerConfig config = {.sequence_length = 5,
                                  .micro_batch_size = 2,
                                  .num_micro_batches = 3,
                                  .seed = 6,
                                  .packing = round % 2 == 0 ? Packing::kStream : Packing::kBestFit};
    constexpr int64_t kChange = 17;
    const Blend blend({{0, first}, {kChange * 6, second}});
    const BatchSource source(files, blend, config, Split::kTrain);

    // The windows of each dataset in the order in which they come.
    std::vector<std::vector<int32_t>> windows(files.size());
    Batch batch;
    for (int64_t step = 0; step < 60; ++step) {
      std::vector<int64_t> counts;
      for (const auto& list : windows) counts.push_back(static_cast<int64_t>(list.size()));
      ASSERT_EQ(source.count_samples(step), counts);
      for (int64_t micro = 0; micro < 3; ++micro) {
        source.fetch(step, micro, batch);
        for (int64_t row = 0; row < 2; ++row) {
          const int32_t token = batch.tokens[row * 5];
          windows[(token - 1) / kIdsPerFile].push_back(token);
        }
      }
    }
    for (size_t i = 0; i < files.size(); ++i) {
      // Alone, the dataset gives the same windows.
      const BatchSource alone(files[i], config, Split::kTrain);
      const auto num_steps = static_cast<int64_t>(windows[i].size() / 6 + 1);
      std::vector<int32_t> expected = window_starts(alone, config, num_steps);
      expected.resize(windows[i].size());
      EXPECT_EQ(windows[i], expected);
    }
    const BatchSource again(files, blend, config, Split::kTrain);
    Batch other;
    for (const int64_t step : {59, 0, 17, 16, 18, 40}) {
      source.fetch(step, 1, batch);
      again.fetch(step, 1, other);
      EXPECT_TRUE(same(batch, other));
    }
  }
}

TEST_F(SamplerTest, ValidationOfABlendCountsEachWindowOnce) {
  const std::vector<std::shared_ptr<const TokenFile>> files = {make_file({100, 50}, 1),
                                                               make_file({80, 20}, 1001)};
  const SamplerConfig config = {.sequence_length = 4,
                                .micro_batch_size = 3,
                                .num_micro_batches = 2,
                                .validation_fraction = 0.3};
  const Blend blend({{0, {1, 5}}});
  const BatchSource source(files, blend, config, Split::kValidation);
  EXPECT_EQ(source.num_tokens(), 50 + 20);
  ASSERT_EQ(source.num_windows(), 12 + 4);
  const Seen seen = watch(source, config, source.steps_per_epoch());
  EXPECT_EQ(seen.labels.size(), 48 + 16);
  for (const auto& [label, count] : seen.labels) EXPECT_EQ(count, 1) << label;
  EXPECT_EQ(seen.labels.begin()->first, 102);
  EXPECT_EQ(seen.labels.rbegin()->first, 1097);
}

TEST_F(SamplerTest, RefusesWhatCannotBeSampled) {
  const auto file = make_file({10});
  const auto open = [&](SamplerConfig config, Split split) {
    return error_of([&] { const BatchSource source(file, config, split); });
  };
  const SamplerConfig good = {.sequence_length = 9, .micro_batch_size = 1};
  EXPECT_EQ(open(good, Split::kTrain), "");
  SamplerConfig config = good;
  config.sequence_length = 10;
  EXPECT_THAT(open(config, Split::kTrain),
              HasSubstr("training has 10 tokens, but one sequence takes 11"));
  EXPECT_THAT(open(good, Split::kValidation), HasSubstr("leaves none for validation"));
  config = good;
  config.validation_fraction = 0.2;
  EXPECT_THAT(open(config, Split::kTrain), HasSubstr("training has 8 tokens"));
  EXPECT_THAT(open(config, Split::kValidation), HasSubstr("validation has 2 tokens"));
  config.validation_fraction = 0.99;
  EXPECT_THAT(open(config, Split::kTrain), HasSubstr("leaves none for training"));
  config.validation_fraction = 1.0;
  EXPECT_THAT(open(config, Split::kTrain), HasSubstr("validation_fraction is 1"));
  config = good;
  config.micro_batch_size = 0;
  EXPECT_THAT(open(config, Split::kTrain), HasSubstr("micro_batch_size is 0"));
  config = good;
  config.num_micro_batches = -1;
  EXPECT_THAT(open(config, Split::kTrain), HasSubstr("micro-batches is -1"));
  config = good;
  config.sequence_length = 0;
  EXPECT_THAT(open(config, Split::kTrain), HasSubstr("sequence_length is 0"));
  const auto empty = make_file({0, 0});
  EXPECT_THAT(error_of([&] { BatchSource(empty, good, Split::kTrain); }),
              HasSubstr("holds no tokens"));
}

}  // namespace
}  // namespace tessera
