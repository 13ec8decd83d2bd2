#include "checkpoint/format/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Manifest example() {
  Manifest manifest;
  manifest.step = 120;
  manifest.files = {{"model-00000.safetensors", {100, 0x0123456789abcdef}}, {"b", {0, ~0ULL}}};
  manifest.tensors["w \"1\""] = {TensorGroup::kModel,
                                 DType::kBF16,
                                 Shape{4, 6},
                                 {{"model-00000.safetensors", "k", {Shape{0, 0}, Shape{4, 2}}},
                                  {"b", "k", {Shape{0, 2}, Shape{4, 4}}}}};
  manifest.tensors["scalar"] = {
      TensorGroup::kOptimizer, DType::kF32, Shape{}, {{"b", "s", {Shape{}, Shape{}}}}};
  manifest.tensors["empty"] = {TensorGroup::kModel, DType::kI64, Shape{0, 3}, {}};
  manifest.state = R"({"rng":[18446744073709551615,-1,0.1],"text":"a\nb"})";
  return manifest;
}

TEST(Manifest, RoundTrip) {
  const Manifest manifest = example();
  const Manifest parsed = parse_manifest(manifest_text(manifest), "m");
  EXPECT_EQ(parsed.step, 120);
  EXPECT_EQ(parsed.state, manifest.state);
  EXPECT_EQ(parsed.files.at("model-00000.safetensors").checksum, 0x0123456789abcdefULL);
  EXPECT_EQ(parsed.files.at("b").checksum, ~0ULL);
  const TensorRecord& record = parsed.tensors.at("w \"1\"");
  EXPECT_EQ(record.dtype, DType::kBF16);
  EXPECT_EQ(record.shape, (Shape{4, 6}));
  ASSERT_EQ(record.pieces.size(), 2U);
  EXPECT_EQ(record.pieces[1].rectangle, (Rectangle{Shape{0, 2}, Shape{4, 4}}));
  EXPECT_EQ(parsed.tensors.at("scalar").group, TensorGroup::kOptimizer);
  EXPECT_EQ(manifest_text(parsed), manifest_text(manifest));
}

TEST(Manifest, StepsThatNoRunReachesAreDamage) {
  Manifest manifest = example();
  manifest.step = kMaxStep;
  EXPECT_EQ(parse_manifest(manifest_text(manifest), "m").step, kMaxStep);
  for (const int64_t step : {kMaxStep + 1, std::numeric_limits<int64_t>::max(), int64_t{-1}}) {
    manifest.step = step;
    EXPECT_THROW(parse_manifest(manifest_text(manifest), "m"), UserError) << step;
  }
}

TEST(Manifest, TheStateMustBeAnObject) {
  Manifest manifest;
  for (const char* state : {"", "[]", "1", "{", R"({"a":1,"a":2})"}) {
    manifest.state = state;
    EXPECT_THROW(manifest_text(manifest), UserError) << state;
  }
}

/// Refused, with the message, when `from` is replaced in the example.
void expect_refused(const std::string& from, const std::string& to, const std::string& message) {
  std::string text = manifest_text(example());
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  EXPECT_THAT([&] { parse_manifest(text, "m.json"); },
              ThrowsMessage<UserError>(AllOf(HasSubstr("m.json"), HasSubstr(message))));
}

TEST(Manifest, RefusesAnotherFormat) {
  expect_refused("tessera-checkpoint", "other", "format is 'other'");
  expect_refused("\"version\":1", "\"version\":2", "format version 2 is not supported");
  expect_refused("\"version\":1", "\"version\":1,\"more\":1", "unknown member 'more'");
  expect_refused("\"step\":120", "\"step\":-1", "step must be an integer");
  expect_refused("\"state\":{", "\"state\":[{", "not valid JSON");
  expect_refused("\"files\":{", "\"files\":1,\"x\":{", "unknown member 'x'");
}

TEST(Manifest, RefusesNamesOutsideTheFolder) {
  for (const char* name : {"../b", "/b", "a/b", "", ".", "..", ".hidden", "b\\u0000"}) {
    expect_refused("\"b\":{", fmt::format("\"{}\":{{", name), "not a plain file name");
  }
}

TEST(Manifest, RefusesWrongFiles) {
  expect_refused("\"bytes\":100", "\"bytes\":1e2", "bytes must be an integer");
  expect_refused("0123456789abcdef", "0123", "16 hexadecimal digits");
  expect_refused("0123456789abcdef", "0123456789abcdeg", "16 hexadecimal digits");
  expect_refused("0123456789abcdef", "-123456789abcdef", "16 hexadecimal digits");
  expect_refused("\"file\":\"b\"", "\"file\":\"c\"", "file 'c', which is not listed");
}

TEST(Manifest, RefusesWrongPieces) {
  expect_refused("\"group\":\"optimizer\"", "\"group\":\"other\"", "unknown group 'other'");
  expect_refused("[0, 2]", "[0, 3]", "leaves the tensor's shape [4, 6]");
  expect_refused("[0, 2]", "[0]", "leaves the tensor's shape");
  expect_refused("[0, 2]", "[0, 1]", "overlap");
  expect_refused("[4, 4]", "[4, 3]", "hold 20 of 24 elements");
  expect_refused("\"shape\":[4, 2]", "\"shape\":[4, 3]", "overlap");
  expect_refused("[4, 6]", "[4, 9223372036854775807]", "more elements than a tensor can hold");
  expect_refused("\"offset\":[],\"shape\":[]}",
                 "\"offset\":[],\"shape\":[]},{\"file\":\"b\","
                 "\"key\":\"s\",\"offset\":[],\"shape\":[]}",
                 "2 pieces hold its one element");
}

}  // namespace
}  // namespace tessera
