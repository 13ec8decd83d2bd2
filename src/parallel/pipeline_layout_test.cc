#include "parallel/pipeline_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(PipelineLayout, ReadsGroupsAndRepetitions) {
  const PipelineLayout layout = parse_pipeline_layout("Et*3|(tt|)*2L", 2, 7);
  EXPECT_EQ(to_string(layout), "[E t*3] [t*2] [t*2] [L]");
  EXPECT_EQ(layout.chunks_per_stage(), 2);
  EXPECT_EQ(layout.chunks[2].first_layer, 5);
  EXPECT_EQ(to_string(parse_pipeline_layout("EtL", 1, 1)), "[E t*1 L]");
  EXPECT_EQ(to_string(parse_pipeline_layout("E|((t)*2|)*2tL", 4, 5)), "[E] [t*2] [t*2] [t*1 L]");
}

TEST(PipelineLayout, ReadsThePapersLayoutWithoutPrediction) {
  // DeepSeek-V3 on H100, the multi-token prediction's place taken by a layer.
  const PipelineLayout layout = parse_pipeline_layout("Et*3|(tt|)*28t|t|L", 8, 61);
  EXPECT_EQ(std::ssize(layout.chunks), 32);
  EXPECT_EQ(layout.chunks_per_stage(), 4);
  EXPECT_EQ(layout.chunks[0].num_layers, 3);
  EXPECT_TRUE(layout.chunks[31].loss);
  EXPECT_EQ(layout.chunks[31].num_layers, 0);
}

TEST(PipelineLayout, RefusalsSayWhereAndWhy) {
  const auto refuses = [](const char* text, const char* message) {
    EXPECT_THAT([&] { parse_pipeline_layout(text, 2, 4); },
                ThrowsMessage<UserError>(HasSubstr(message)))
        << text;
  };
  refuses("", "is empty");
  refuses("Ett|xL", "found 'x', expected E, t, L, |, ( or ) at character 5");
  refuses("Ett|ttm|L", "multi-token prediction (m) is not supported at character 7");
  refuses("E(tt|ttL", "a '(' is not closed at character 9");
  refuses("Ett)|ttL", "a ')' without its '(' at character 4");
  refuses("Et*|ttL", "expected a number above 0 after '*' at character 4");
  refuses("Et*0|ttL", "expected a number above 0");
  refuses("Et*99999999999|L", "the number is too large");
  refuses("E((t*1000)*1000)*1000|L", "more than a million layers");
  refuses("tt|ttL", "must have one E, at its beginning");
  refuses("Ett|tt", "must have one L, at its end");
  refuses("Ett|ttL|", "must have one L, at its end");
  refuses("Ett|tL", "has 3 decoder layers, the model 4");
  refuses("Ett||ttL", "has an empty chunk");
  refuses("Ett|t|tL", "has 3 chunks for 2 stages; it needs a multiple, 2 or 4");
  refuses("((((((((((((((((((t", "nested too deeply");
}

TEST(PipelineLayout, EvenLayoutsHoldEachLayerOnce) {
  for (const int64_t stages : {1, 2, 5}) {
    for (const int64_t chunks : {1, 3}) {
      for (int64_t layers = stages * chunks; layers < 40; ++layers) {
        const PipelineLayout layout = even_pipeline_layout(stages, chunks, layers);
        ASSERT_EQ(std::ssize(layout.chunks), stages * chunks);
        int64_t next = 0;
        for (const PipelineChunk& chunk : layout.chunks) {
          EXPECT_EQ(chunk.first_layer, next);
          EXPECT_LE(std::abs(chunk.num_layers - layers / (stages * chunks)), 1);
          next += chunk.num_layers;
        }
        EXPECT_EQ(next, layers);
        EXPECT_TRUE(layout.chunks.front().embedding && layout.chunks.back().loss);
      }
    }
  }
  EXPECT_THAT([] { even_pipeline_layout(4, 2, 7); },
              ThrowsMessage<UserError>(HasSubstr("7 layers do not fill 4 stages of 2 chunks")));
}

}  // namespace
}  // namespace tessera
