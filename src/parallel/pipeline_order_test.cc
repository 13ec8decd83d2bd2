#include "parallel/pipeline_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

PipelineSpec draw_spec(Random& random) {
  PipelineSpec spec{.kind = static_cast<PipelineKind>(random.next_below(3)),
                    .num_stages = 1 + static_cast<int64_t>(random.next_below(6)),
                    .num_micro_batches = 1 + static_cast<int64_t>(random.next_below(14))};
  if (spec.kind == PipelineKind::kInterleaved)
    spec.num_chunks = 1 + static_cast<int64_t>(random.next_below(3));
  spec.split_weights = random.next_below(3) == 0;
  spec.merges_passes =
      spec.kind != PipelineKind::kGpipe && !spec.split_weights && random.next_below(2) == 0;
  return spec;
}

/// Every schedule of the program is one that a file may have.
TEST(PipelineOrder, ReadsWhatIsWritten) {
  Random random(7, 0);
  for (int i = 0; i < 300; ++i) {
    const PipelineSpec spec = draw_spec(random);
    const PipelineOrder order = make_pipeline_schedule(spec);
    const PipelineOrder read = parse_pipeline(list_pipeline(order), "order");
    EXPECT_EQ(read, order);
    EXPECT_EQ(merges_passes(read), merges_passes(order));
    EXPECT_NO_THROW(check_pipeline(spec, read, "order")) << list_pipeline(order);
  }
}

TEST(PipelineOrder, LeavesCommentsAndEmptyLinesOut) {
  const PipelineOrder order = parse_pipeline(
      "# two stages\n\n stage 0  F0.0 F0.1\tB0.0 # late\r\nstage 1 F0.0 B0.0\n\n", "order");
  ASSERT_EQ(order.size(), 2);
  EXPECT_EQ(order[0].size(), 3);
  EXPECT_EQ(order[0][1], (PipelineStep{.micro_batch = 1}));
  EXPECT_EQ(order[1][1], (PipelineStep{.pass = PipelinePass::kBackward}));
  EXPECT_TRUE(parse_pipeline("", "order").empty());
}

TEST(PipelineOrder, RefusesOtherText) {
  const auto expect_refused = [](const std::string& text, const std::string& line,
                                 const std::string& found) {
    EXPECT_THAT(
        [&] { parse_pipeline(text, "my.order"); },
        ThrowsMessage<UserError>(AllOf(HasSubstr("my.order"), HasSubstr(line), HasSubstr(found))))
        << text;
  };
  expect_refused("F0.0 B0.0", "line 1", "\"F0.0\"");
  expect_refused("stage 0 F0.0 B0.0\nstage 2 F0.0 B0.0", "line 2", "stage 1");
  expect_refused("stage", "line 1", "stage 0");
  for (const char* word : {"X0.0", "F00", "F0.", "F.0", "F0.x", "F0.-1", "F0.0|F0.1", "B0.0|F0.1",
                           "F0.0|", "|B0.0", "F0.99999999999999999999", "F0.0|B0.0|F0.1"})
    expect_refused(fmt::format("stage 0 {}", word), "line 1", word);
}

void expect_refused(const std::string& text, const std::string& why, PipelineSpec spec = {}) {
  const PipelineOrder order = parse_pipeline(text, "order");
  EXPECT_THAT([&] { check_pipeline(spec, order, "order"); },
              ThrowsMessage<UserError>(HasSubstr(why)))
      << text;
}

TEST(PipelineOrder, RefusesWhatIsNoScheduleOfTheLayout) {
  const PipelineSpec one{.num_micro_batches = 2};
  expect_refused("", "0 stages, but the layout has 1", one);
  expect_refused("stage 0 F0.0 B0.0", "does not have F0.1", one);
  expect_refused("stage 0 F0.0 F0.1 B0.0", "does not have B0.1", one);
  expect_refused("stage 0 F0.0 B0.0 F0.1 B0.1 F0.2", "a step has 2 micro-batches", one);
  expect_refused("stage 0 F0.0 B0.0 F1.0", "one chunk is there", one);
  expect_refused("stage 0 F0.0 B0.0 F0.0", "F0.0 where F0.1", one);
  expect_refused("stage 0 F0.1 F0.0 B0.0 B0.1", "F0.1 where F0.0", one);
  expect_refused("stage 0 F0.0 F0.1 B0.1 B0.0", "B0.1 where B0.0", one);
  expect_refused("stage 0 B0.0 F0.0 F0.1 B0.1", "B0.0 before F0.0", one);
  expect_refused("stage 0 F0.0 B0.0 W0.0 F0.1 B0.1 W0.1", "parallel.split_weights", one);
  expect_refused("stage 0 F0.0|B0.0 F0.1 B0.1", "merges F0.0 with B0.0", one);
  const PipelineSpec split{.num_micro_batches = 1, .split_weights = true};
  expect_refused("stage 0 F0.0 B0.0", "does not have W0.0", split);
  expect_refused("stage 0 F0.0 W0.0 B0.0", "W0.0 before B0.0", split);
}

TEST(PipelineOrder, RefusesStagesThatDoNotFitTogether) {
  const PipelineSpec two{.num_stages = 2, .num_micro_batches = 2};
  EXPECT_NO_THROW(check_pipeline(
      two, parse_pipeline("stage 0 F0.0 F0.1 B0.0 B0.1\nstage 1 F0.0 B0.0 F0.1 B0.1", ""), ""));
  expect_refused("stage 0 F0.0 B0.0 F0.1 B0.1\nstage 1 F0.0 F0.1 B0.0 B0.1", "wait forever", two);
  // Of two chunks, what one stage sends first the other expects second.
  const PipelineSpec chunks{
      .kind = PipelineKind::kInterleaved, .num_stages = 2, .num_chunks = 2, .num_micro_batches = 2};
  expect_refused(
      "stage  0 F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1\n"
      "stage  1 F0.0 F1.0 F0.1 B1.0 F1.1 B1.1 B0.0 B0.1\n",
      "stage 0 sends the results of F0.1, but stage 1 expects those of F1.0 then", chunks);
}

}  // namespace
}  // namespace tessera
