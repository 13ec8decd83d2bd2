#include "parallel/pipeline_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(PipelineLayout, ReadsGroupsAndRepetitions) {
  const PipelineLayout layout = parse_pipeline_layout("Et*3|(tt|)*2L", 2, {7});
  EXPECT_EQ(to_string(layout), "[E t*3] [t*2] [t*2] [L]");
  EXPECT_EQ(layout.chunks_per_stage(), 2);
  EXPECT_EQ(layout.chunks[2].first_layer, 5);
  EXPECT_EQ(to_string(parse_pipeline_layout("EtL", 1, {1})), "[E t*1 L]");
  EXPECT_EQ(to_string(parse_pipeline_layout("E|((t)*2|)*2tL", 4, {5})), "[E] [t*2] [t*2] [t*1 L]");
}

/// DeepSeek-V3 on H100 and GB200 (Megatron-Core MoE, section 9.3).
TEST(PipelineLayout, ReadsThePapersLayouts) {
  const PipelineLayout h100 = parse_pipeline_layout("Et*3|(tt|)*29m|L", 8, {61, 1});
  ASSERT_EQ(std::ssize(h100.chunks), 32);
  EXPECT_EQ(h100.chunks[0], (PipelineChunk{.embedding = true, .num_layers = 3}));
  EXPECT_EQ(h100.chunks[30], (PipelineChunk{.first_layer = 61, .num_mtp = 1}));
  EXPECT_EQ(h100.chunks[31], (PipelineChunk{.first_layer = 62, .loss = true}));
  const PipelineLayout gb200 = parse_pipeline_layout("Et*4|(tttt|)*14tmL", 4, {61, 1});
  ASSERT_EQ(std::ssize(gb200.chunks), 16);
  EXPECT_EQ(gb200.chunks[15],
            (PipelineChunk{.first_layer = 60, .num_layers = 1, .num_mtp = 1, .loss = true}));
}

TEST(PipelineLayout, PredictionIsBehindTheDecoder) {
  const PipelineLayout layout = parse_pipeline_layout("Et|tm|m|L", 2, {2, 2});
  EXPECT_EQ(to_string(layout), "[E t*1] [t*1 m*1] [m*1] [L]");
  EXPECT_EQ(layout.chunks[1].first_layer, 1);
  EXPECT_EQ(layout.chunks[2].first_layer, 3);
  EXPECT_EQ(to_string(even_pipeline_layout(2, 1, {4, 2})), "[E t*2] [t*2 m*2 L]");
  EXPECT_THAT(
      [] {
        parse_pipeline_layout("Etm|tL", 2, {2, 1});
      },
      ThrowsMessage<UserError>(HasSubstr("a decoder layer (t) behind")));
  const LayerCounts beside_loss{.decoder = 2, .mtp = 2, .mtp_beside_loss = true};
  EXPECT_EQ(to_string(parse_pipeline_layout("Et|tmmL", 2, beside_loss)), "[E t*1] [t*1 m*2 L]");
  EXPECT_THAT([&] { parse_pipeline_layout("Et|t|m|mL", 2, beside_loss); },
              ThrowsMessage<UserError>(HasSubstr("in another chunk than the loss (L)")));
}

TEST(PipelineLayout, RefusalsSayWhereAndWhy) {
  const auto refuses = [](const char* text, const char* message) {
    EXPECT_THAT([&] { parse_pipeline_layout(text, 2, {4}); },
                ThrowsMessage<UserError>(HasSubstr(message)))
        << text;
  };
  refuses("", "is empty");
  refuses("Ett|xL", "found 'x', expected E, t, m, L, |, ( or ) at character 5");
  refuses("Ett|ttm|L", "has 1 layers of multi-token prediction (m), model.mtp_layers is 0");
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
        const PipelineLayout layout = even_pipeline_layout(stages, chunks, {layers});
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
  EXPECT_THAT([] { even_pipeline_layout(4, 2, {7}); },
              ThrowsMessage<UserError>(
                  HasSubstr("7 layers do not fill 4 stages of 2 chunks; lower parallel.pp or "
                            "parallel.pipeline_chunks, whose product may be 7")));
}

TEST(PipelineLayout, IsReadAsItIsWritten) {
  for (const auto& [text, stages, layers] :
       std::vector<std::tuple<std::string, int64_t, LayerCounts>>{
           {"Et*3|t*2|t|L", 2, {6}}, {"EtL", 1, {1}}, {"E|t*4|tm|mL", 4, {5, 2}}}) {
    const PipelineLayout layout = parse_pipeline_layout(text, stages, layers);
    EXPECT_EQ(write_pipeline_layout(layout), text);
  }
  const LayerCounts layers{.decoder = 13, .mtp = 1};
  const PipelineLayout even = even_pipeline_layout(2, 3, layers);
  EXPECT_EQ(parse_pipeline_layout(write_pipeline_layout(even), 2, layers).chunks, even.chunks);
}

}  // namespace
}  // namespace tessera
