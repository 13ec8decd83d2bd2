#include "train/setup/blend_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "data/token_file_writer.h"
#include "train/setup/training_data.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Strings = std::vector<std::string>;

std::string error_of(const Strings& blend, const Strings& changes = {}) {
  try {
    parse_blend(blend, changes);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(BlendSettingsTest, EntriesAreWeightsAndPrefixes) {
  const BlendPlan plan =
      parse_blend({"0.7 data/a.bin", " 3e-1  with space, and comma"},
                  {"2000: 1 data/a", "2000:1 new", "3000 : 0 data/a", "3000: 2 new.idx"});
  EXPECT_THAT(plan.prefixes, ElementsAre("data/a", "with space, and comma", "new"));
  ASSERT_EQ(plan.changes.size(), 3);
  EXPECT_THAT(plan.changes[0].weights, ElementsAre(0.7, 0.3, 0));
  EXPECT_EQ(plan.changes[1].first_step, 2000);
  EXPECT_THAT(plan.changes[1].weights, ElementsAre(1, 0, 1));
  EXPECT_EQ(plan.changes[2].first_step, 3000);
  EXPECT_THAT(plan.changes[2].weights, ElementsAre(0, 0, 2));
  const Blend blend = plan.make_blend(4);
  EXPECT_EQ(blend.count(0, 8000), 5600);
  EXPECT_EQ(blend.count(2, 8000), 0);
  EXPECT_EQ(blend.count(2, 12'000), 2000);
}

TEST(BlendSettingsTest, MistakesNameTheEntry) {
  for (const char* entry : {"", "0.5", "a", "0.5a", "a 0.5", "0.5 ", "1,5 a"}) {
    EXPECT_THAT(error_of({entry}), HasSubstr("is not a weight and a path")) << entry;
  }
  EXPECT_THAT(error_of({"-1 a"}), HasSubstr("'-1 a': the weight is -1"));
  EXPECT_THAT(error_of({"inf a"}), HasSubstr("the weight is inf"));
  EXPECT_THAT(error_of({"1 a", "2 a.bin"}), HasSubstr("'2 a.bin': the dataset is in this blend"));
  EXPECT_THAT(error_of({"0 a", "0 b"}), HasSubstr("all weights from step 0 on are 0"));
  EXPECT_THAT(error_of({}, {"5: 1 a"}), HasSubstr("data.blend, which it changes, is not"));
  EXPECT_THAT(error_of({"1 a"}, {"1 a"}), HasSubstr("'1 a' has no first step"));
  EXPECT_THAT(error_of({"1 a"}, {"0: 1 a"}), HasSubstr("steps begin at 1"));
  EXPECT_THAT(error_of({"1 a"}, {"4611686018427387904: 1 a"}), HasSubstr("steps end at"));
  EXPECT_THAT(error_of({"1 a"}, {"9: 1 a", "8: 1 a"}), HasSubstr("the one before is 9"));
  EXPECT_THAT(error_of({"1 a"}, {"9: 0 a"}), HasSubstr("all weights from step 9 on are 0"));
}

/// Two token files of their own ids, and the settings of a blend of them.
class BlendDataTest : public ::testing::Test {
 protected:
  BlendDataTest() {
    for (const int32_t id : {10, 20}) {
      TokenFileWriter writer(prefix(id), 257);
      for (int document = 0; document < 50; ++document) {
        writer.append(std::vector<int32_t>(20, id));
        writer.end_document();
      }
      writer.finish();
    }
    settings_.data.sequence_length = 8;
    settings_.train.micro_batch = 2;
    settings_.train.global_batch = 4;
    settings_.data.blend = {"3 " + prefix(10), "1 " + prefix(20)};
    settings_.data.blend_changes = {"5: 1 " + prefix(20)};
  }
  ~BlendDataTest() override { fs::remove_all(folder_); }

  std::string prefix(int32_t id) const { return (folder_ / std::to_string(id)).string(); }

  fs::path folder_ = fs::path(::testing::TempDir()) / unique_name("blend_settings_test-");
  Settings settings_;
};

TEST_F(BlendDataTest, TrainingDrawsFromAllByWeightAndStep) {
  const TrainingData data = open_training_data(settings_);
  EXPECT_EQ(data.num_tokens(), 2000);
  EXPECT_EQ(data.num_documents(), 100);
  ASSERT_NE(data.validation, nullptr);
  EXPECT_EQ(data.validation->num_tokens(), 120);
  Batch batch;
  for (int64_t step = 0; step < 10; ++step) {
    int64_t first = 0;
    for (const int64_t micro : {0, 1}) {
      data.train->fetch(step, micro, batch);
      first += std::ranges::count(batch.tokens, 10);
    }
    EXPECT_EQ(first, step < 5 ? 3 * 8 : 0) << step;
  }
  EXPECT_EQ(data.describe_samples(10), prefix(10) + ": 15 samples, 0.128 epochs; " + prefix(20) +
                                           ": 25 samples, 0.214 epochs");
}

TEST_F(BlendDataTest, OneSourceOfDataAtATime) {
  settings_.train.steps = 100;
  settings_.schedule.num_steps = 100;
  EXPECT_NO_THROW(validate(settings_));
  settings_.data.tokens = prefix(10);
  EXPECT_THROW(validate(settings_), UserError);
  settings_.data.tokens.clear();
  settings_.data.text = "text.txt";
  EXPECT_THROW(validate(settings_), UserError);
  settings_.data.text.clear();
  settings_.data.blend = {"a"};
  EXPECT_THROW(validate(settings_), UserError);
}

}  // namespace
}  // namespace tessera
