#include "train/infer/decoding_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"
#include "train/infer/decoding_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::Rig;
using testing::run_all;
using testing::run_alone;
using ::testing::ThrowsMessage;
using testing::Written;

/// Requests alone, all at once, and joining and leaving at random have the same bits.
void expect_invariant(Rig& rig) {
  const DecodingLimits limits{.max_sequences = 12, .context = 200};
  std::vector<DecodingRequest> requests;
  std::vector<Written> alone;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    requests.push_back(rig.request(seed));
    alone.push_back(run_alone(rig, requests.back(), limits));
  }
  for (const DecodingLimits& other :
       {limits, DecodingLimits{.max_sequences = 24, .context = 200, .max_rows = 7},
        DecodingLimits{.max_sequences = 3, .context = 200, .cache_tokens = 400, .max_rows = 64}}) {
    DecodingBatch batch = rig.batch(other);
    std::map<int64_t, Written> written;
    for (const DecodingRequest& request : requests) batch.add(request);
    run_all(batch, written);
    for (size_t i = 0; i < requests.size(); ++i)
      EXPECT_EQ(written[static_cast<int64_t>(i)], alone[i]) << "sequence " << i;
  }
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatch) {
  Rig f32;
  expect_invariant(f32);
  Rig bf16(DType::kBF16);
  expect_invariant(bf16);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithWindowsSinksAndBiases) {
  Rig rig(DType::kBF16, [](ModelConfig& model) {
    model.attention_sinks = model.qkv_bias = model.output_bias = true;
    model.window = 4;
    model.window_layers = {0};
    model.activation = Activation::kSwiGLUOai;
    model.moe.mlp_bias = model.moe.router_bias = true;
    model.moe.score_order = ScoreOrder::kAfterTopK;
    model.tie_embeddings = true;
  });
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnThreads) {
  Rig rig;
  const DecodingLimits limits{.context = 200};
  const Written before = run_alone(rig, rig.request(10), limits);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(3);
  EXPECT_EQ(run_alone(rig, rig.request(10), limits), before);
  omp_set_num_threads(threads);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithLatents) {
  Rig rig(DType::kBF16, testing::make_latent);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithChosenKeys) {
  Rig rig(DType::kBF16, testing::make_indexed);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithCompressedTokens) {
  Rig rig(DType::kBF16, testing::make_compressed);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithStates) {
  Rig rig(DType::kBF16, testing::make_delta);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithStatesOfKimiDelta) {
  Rig rig(DType::kBF16, testing::make_kimi);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithScans) {
  Rig rig(DType::kBF16, testing::make_mamba);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithConvolutions) {
  Rig rig(DType::kBF16, testing::make_conv);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithLayerNormsAndSparseMixer) {
  Rig rig(DType::kBF16, testing::make_phi);
  expect_invariant(rig);
}

TEST(DecodingBatch, BitsDoNotDependOnTheBatchWithChunks) {
  Rig rig(DType::kBF16, testing::make_chunks);
  expect_invariant(rig);
}

/// The generator of single sequences is the same arithmetic up to the order of sums.
void expect_as_the_generator(Rig& rig) {
  Generator generator(rig.config, rig.dtype, rig.backend, *rig.parameters, rig.experts);
  for (uint64_t seed = 0; seed < 12; ++seed) {
    DecodingRequest request = rig.request(seed);
    request.num_alternatives = 0;
    request.scores_prompt = true;
    request.options.temperature = 0;  // of two that are almost alike either may be drawn
    const Written found = run_alone(rig, request, {.context = 200});
    const Generated expected =
        generator.generate(request.prompt, request.end_of_document, request.options);
    std::vector<GeneratedToken> tokens = expected.prompt;
    tokens.insert(tokens.end(), expected.tokens.begin(), expected.tokens.end());
    ASSERT_EQ(found.ids.size(), tokens.size()) << seed;
    for (size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_EQ(found.ids[i], tokens[i].id);
      EXPECT_NEAR(found.log_probabilities[i], tokens[i].log_probability, 1e-4);
    }
    EXPECT_EQ(found.end == DecodingEnd::kDocument, expected.ended);
  }
}

TEST(DecodingBatch, WritesWhatTheGeneratorWrites) {
  Rig rig;
  expect_as_the_generator(rig);
}

/// Which makes keys and values of the latents.
TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithLatents) {
  Rig rig(DType::kF32, testing::make_latent);
  expect_as_the_generator(rig);
}

TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithChosenKeys) {
  Rig rig(DType::kF32, testing::make_indexed);
  expect_as_the_generator(rig);
}

TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithCompressedTokens) {
  Rig rig(DType::kF32, testing::make_compressed);
  expect_as_the_generator(rig);
}

/// Which takes tokens of a prompt by chunks.
TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithStates) {
  Rig rig(DType::kF32, testing::make_delta);
  expect_as_the_generator(rig);
}

TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithStatesOfKimiDelta) {
  Rig rig(DType::kF32, testing::make_kimi);
  expect_as_the_generator(rig);
}

TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithScans) {
  Rig rig(DType::kF32, testing::make_mamba);
  expect_as_the_generator(rig);
}

TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithConvolutions) {
  Rig rig(DType::kF32, testing::make_conv);
  expect_as_the_generator(rig);
}

/// Whose caches are of different sizes: both within the context that rotations were made for.
TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithLayerNormsAndSparseMixer) {
  Rig rig(DType::kF32, [](ModelConfig& model) {
    testing::make_phi(model);
    model.rope.original_length = 200;
    std::swap(model.rope.short_factors, model.rope.long_factors);
  });
  expect_as_the_generator(rig);
}

TEST(DecodingBatch, WritesWhatTheGeneratorWritesWithChunks) {
  Rig rig(DType::kF32, testing::make_chunks);
  expect_as_the_generator(rig);
}

/// The arithmetic of single rows aside, as the host does.
TEST(DecodingBatch, WritesOnADeviceWhatItWritesOnTheHost) {
  Rig host;
  Rig device(DType::kF32, {}, testing::make_shadow_backend(make_cpu_kernels()));
  testing::expect_alike(host, device, 1e-4);
}

TEST(DecodingBatch, WhoLeavesMakesRoom) {
  Rig rig;
  DecodingBatch batch = rig.batch({.max_sequences = 4, .context = 128, .cache_tokens = 256});
  DecodingRequest request = rig.request(1);
  request.options.max_tokens = 40;
  request.end_of_document = -1;
  std::vector<int64_t> numbers;
  for (int i = 0; i < 6; ++i) numbers.push_back(batch.add(request));
  batch.step();
  EXPECT_EQ(batch.num_running(), 2);  // of one page each
  EXPECT_EQ(batch.num_waiting(), 4);
  batch.remove(numbers[0]);
  batch.remove(numbers[3]);
  batch.remove(1000);
  batch.step();
  EXPECT_EQ(batch.num_running(), 2);
  EXPECT_EQ(batch.num_waiting(), 2);
  std::map<int64_t, Written> written;
  run_all(batch, written);
  EXPECT_EQ(written.size(), 4);
  EXPECT_TRUE(batch.step().empty());
}

/// Requests and departures at random: pages are never lost.
TEST(DecodingBatch, RandomArrivalsAndDeparturesKeepTheirBits) {
  Rig rig;
  const DecodingLimits limits{.max_sequences = 5, .context = 200, .cache_tokens = 700};
  DecodingBatch batch = rig.batch(limits);
  Random random(6, 6);
  std::map<int64_t, uint64_t> seeds;
  std::map<int64_t, Written> written;
  for (int pass = 0; pass < 300; ++pass) {
    if (random.next_below(4) == 0) {
      const uint64_t seed = random.next_below(24);
      seeds[batch.add(rig.request(seed))] = seed;
    }
    if (random.next_below(9) == 0 && !seeds.empty()) {
      const auto gone =
          std::next(seeds.begin(), static_cast<int64_t>(random.next_below(seeds.size())));
      batch.remove(gone->first);
      if (written[gone->first].end == DecodingEnd::kNot) seeds.erase(gone);
    }
    for (const DecodingEvent& event : batch.step()) written[event.sequence].take(event);
  }
  run_all(batch, written);
  for (const auto& [number, seed] : seeds)
    EXPECT_EQ(written[number], run_alone(rig, rig.request(seed), limits)) << number;
}

TEST(DecodingBatch, RefusesWhatItHasNoRoomFor) {
  Rig rig;
  DecodingBatch batch = rig.batch({.max_sequences = 2, .context = 300, .cache_tokens = 128});
  const auto expect_refused = [&](DecodingRequest request, const char* what) {
    EXPECT_THAT([&] { batch.add(request); }, ThrowsMessage<UserError>(HasSubstr(what)));
  };
  expect_refused({}, "no token");
  expect_refused({.prompt = {37}}, "outside the vocabulary");
  expect_refused({.prompt = {-1}}, "outside the vocabulary");
  expect_refused({.prompt = {1}, .options = {.max_tokens = 300}}, "context of 300");
  expect_refused({.prompt = {1}, .options = {.max_tokens = 200}}, "cache of 128");
  expect_refused({.prompt = {1}, .options = {.max_tokens = 2, .top_p = 0}}, "top-p");
  EXPECT_THROW(rig.batch({.max_sequences = 0}), UserError);
  EXPECT_THROW(rig.batch({.context = 0}), UserError);
  EXPECT_THROW(rig.batch({.cache_tokens = -1}), UserError);
}

TEST(PagePool, PagesAreOfOneOwner) {
  PagePool pool(5);
  const auto first = pool.take(2);
  const auto second = pool.take(3);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_THAT(first, ::testing::UnorderedElementsAre(0, 1));
  EXPECT_THROW(pool.take(1), InternalError);
  pool.give_back(first);
  EXPECT_EQ(pool.num_free(), 2);
  pool.give_back(second);
  EXPECT_EQ(pool.num_free(), 5);
  EXPECT_THROW(pool.give_back(first), InternalError);
}

}  // namespace
}  // namespace tessera
