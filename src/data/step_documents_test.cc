#include "data/step_documents.h"

#include <map>
#include <numeric>

#include "data/data_testing.h"

namespace tessera {
namespace {

class StepDocumentsTest : public DataTest {
 protected:
  /// Documents of those lengths, whose token i is 1 + i.
  std::shared_ptr<const TokenFile> make_file(const std::vector<int64_t>& lengths) const {
    TokenFileWriter writer(path("tokens"), 1 << 20);
    int32_t next = 1;
    for (const int64_t length : lengths) {
      std::vector<int32_t> ids(length);
      std::iota(ids.begin(), ids.end(), next);
      next += static_cast<int32_t>(length);
      writer.append(ids);
      writer.end_document();
    }
    writer.finish();
    return std::make_shared<const TokenFile>(path("tokens"), 1 << 20);
  }
};

/// Each token's label and position.
using Contents = std::map<int32_t, std::pair<int32_t, int32_t>>;

Contents contents_of_rows(const BatchSource& source, int64_t step, int64_t num_batches) {
  Contents contents;
  Batch batch;
  for (int64_t i = 0; i < num_batches; ++i) {
    source.fetch(step, i, batch);
    for (size_t t = 0; t < batch.tokens.size(); ++t) {
      if (batch.tokens[t] > 0) contents[batch.tokens[t]] = {batch.labels[t], batch.positions[t]};
    }
  }
  return contents;
}

void add_contents(const DocumentBatch& packed, Contents& contents) {
  const Batch& batch = packed.batch;
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    EXPECT_EQ(batch.tokens[t] > 0, packed.segments[t] >= 0);
    if (batch.tokens[t] == 0) EXPECT_EQ(batch.labels[t], kNoLabel);
    if (batch.tokens[t] == 0) continue;
    EXPECT_TRUE(contents.try_emplace(batch.tokens[t], batch.labels[t], batch.positions[t]).second);
    const int32_t begin = batch.cu_seqlens[packed.segments[t]];
    EXPECT_EQ(batch.positions[t], static_cast<int32_t>(t) - begin);
    EXPECT_LT(static_cast<int32_t>(t), batch.cu_seqlens[packed.segments[t] + 1]);
  }
}

TEST_F(StepDocumentsTest, HaveTheTokensOfTheStepsRows) {
  const auto file = make_file({5, 1, 40, 3, 3, 17, 90, 2, 64, 8, 31});
  for (const Packing packing : {Packing::kStream, Packing::kBestFit}) {
    const BatchSource source(file,
                             {.sequence_length = 16,
                              .micro_batch_size = 2,
                              .num_micro_batches = 3,
                              .split_documents = true,
                              .packing = packing},
                             Split::kTrain);
    for (int64_t step = 0; step < 2; ++step) {
      const StepDocuments documents(source, step);
      for (const int64_t unit : {1, 4}) {
        Contents contents;
        const auto count = static_cast<int32_t>(documents.lengths().size());
        for (int32_t first = 0; first < count; first += 3) {
          std::vector<int32_t> some;
          for (int32_t i = first; i < std::min(first + 3, count); ++i) some.push_back(i);
          add_contents(documents.pack(some, {64, unit, 3 + kFillingSequences}), contents);
        }
        EXPECT_EQ(contents, contents_of_rows(source, step, 3));
      }
    }
  }
}

TEST_F(StepDocumentsTest, FillWhatIsLeft) {
  const BatchSource source(make_file({5, 7, 100}),
                           {.sequence_length = 16,
                            .micro_batch_size = 1,
                            .split_documents = true,
                            .packing = Packing::kBestFit},
                           Split::kAll);
  const StepDocuments documents(source, 0);
  const DocumentBatch none = documents.pack({}, {32, 4, 3});
  EXPECT_THAT(none.batch.cu_seqlens, ::testing::ElementsAre(0, 8, 20, 32));
  EXPECT_EQ(none.batch.num_valid, 0);
  const std::vector<int32_t> first = {0};
  const DocumentBatch one = documents.pack(first, {32, 4, 12});
  EXPECT_EQ(one.batch.num_valid, documents.lengths()[0] - 1);
  for (size_t i = 1; i < one.batch.cu_seqlens.size(); ++i)
    EXPECT_EQ(one.batch.cu_seqlens[i] % 4, 0);
}

}  // namespace
}  // namespace tessera
