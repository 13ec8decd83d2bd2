#include "train/metrics/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>

#include "train/metrics/synthetic_run.h"
#include "train/metrics/test_folder.h"

namespace tessera {
namespace {

using ::testing::StartsWith;

std::string bytes(std::initializer_list<int> values) {
  std::string text;
  for (const int value : values) text += static_cast<char>(value);
  return text;
}

uint64_t word_at(const std::string& text, size_t offset, size_t num_bytes) {
  uint64_t word = 0;
  for (size_t i = 0; i < num_bytes; ++i)
    word |= uint64_t{static_cast<unsigned char>(text[offset + i])} << (8 * i);
  return word;
}

/// Splits a file into its records and checks both sums of each.
std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  for (size_t offset = 0; offset < file.size();) {
    const size_t length = word_at(file, offset, 8);
    EXPECT_EQ(word_at(file, offset + 8, 4), masked_crc32c(file.substr(offset, 8)));
    records.push_back(file.substr(offset + 12, length));
    EXPECT_EQ(word_at(file, offset + 12 + length, 4), masked_crc32c(records.back()));
    offset += length + 16;
  }
  return records;
}

// The vectors of RFC 3720, appendix B.4, and the usual check value.
TEST(Crc32c, AgreesWithThePublishedVectors) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eU);
}

TEST(TensorBoard, VersionRecordHasExactBytes) {
  // Event{wall_time: 1.0, file_version: "brain.Event:2"}; the sums are those that tensorboard 2.x
  // itself writes.
  const std::string event =
      bytes({0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x1a, 0x0d}) + "brain.Event:2";
  EXPECT_EQ(version_event(1.0), event);
  EXPECT_EQ(tfrecord(event), bytes({24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22}) + event +
                                 bytes({0x86, 0xbf, 0x57, 0x7a}));
}

TEST(TensorBoard, ScalarEventHasExactBytes) {
  const std::array scalars = {Scalar{"a", 1.5}};
  EXPECT_EQ(scalars_event(1.0, 300, scalars),
            bytes({0x09, 0,    0,    0,    0,    0,    0,   0xf0, 0x3f, 0x10, 0xac, 0x02,
                   0x2a, 0x0a, 0x0a, 0x08, 0x0a, 0x01, 'a', 0x15, 0,    0,    0xc0, 0x3f}));
}

TEST(TensorBoard, RestartEventHasExactBytes) {
  EXPECT_EQ(restart_event(1.0, 5),
            bytes({0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x10, 0x05, 0x3a, 0x02, 0x08, 0x01}));
}

TEST(TensorBoard, ScalarsTellOfTheBusiestAndTheIdlestExpert) {
  StepRecord record;
  record.balance_loss = 1.1;
  record.expert_load = {{3, {10, 30, 0, 40}}, {5, {0, 0}}};
  const auto scalars = step_scalars(record);
  std::map<std::string, double> values;
  for (const Scalar& scalar : scalars) values[scalar.tag] = scalar.value;
  EXPECT_DOUBLE_EQ(values.at("experts/busiest/layer_03"), 2.0);
  EXPECT_DOUBLE_EQ(values.at("experts/idlest/layer_03"), 0.0);
  EXPECT_DOUBLE_EQ(values.at("experts/balance_loss"), 1.1);
  EXPECT_FALSE(values.contains("experts/busiest/layer_05"))
      << "a layer without tokens has no shares";
}

TEST(TensorBoard, FileIsARunOfWholeRecords) {
  const TestFolder folder;
  {
    TensorBoardFile file(folder.path(), 8);
    for (int64_t step = 8; step < 20; ++step) file.write(SyntheticRun{100, 2}.step(step));
    file.write(ValidationRecord{20, 0, 4.0, 0.0});
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    files.push_back(entry.path());
  ASSERT_EQ(files.size(), 1U);
  EXPECT_THAT(files[0].filename().string(), StartsWith("events.out.tfevents."));
  EXPECT_EQ(records_of(read_text_file(files[0])).size(), 15U);
}

}  // namespace
}  // namespace tessera
