// Whole runs of ranks with a GPU each, as threads of this process, beside runs on one GPU. Where
// there are fewer GPUs than ranks, all ranks share the first, and what they send goes through the
// host.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "comm/staged_world.h"
#include "core/file/file.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/memory/planned_rank.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

int64_t count_gpus() {
  const auto gpus = std::ssize(list_gpus().gpus);
  return find_nccl().version > 0 ? gpus : std::min<int64_t>(gpus, 1);
}

/// As many ranks as the tests that draw layouts use.
int64_t count_ranks() {
  return count_gpus() > 1 ? count_gpus() : 4;
}

/// Rank r takes GPU r, or all take the first.
RankDevice choose_gpu(const Settings& settings, World& host) {
  if (host.size() > count_gpus())
    return {.backend = make_cuda_backend(0), .world = make_staged_world(host)};
  Settings on_gpu = settings;
  on_gpu.run.device = DeviceChoice::kCuda;
  return choose_device(on_gpu, host);
}

class SeveralGpus : public ::testing::Test {
 protected:
  SeveralGpus() { fs::create_directories(folder_); }
  ~SeveralGpus() override { fs::remove_all(folder_); }
  void SetUp() override {
    if (count_gpus() == 0) GTEST_SKIP() << "no GPUs: " << list_gpus().why;
  }

  static testing::NamedLayout data_parallel(int64_t size, ShardSettings shard, int64_t ep = 1) {
    testing::NamedLayout layout{.name = "dp", .num_ranks = size, .parallel = {}, .shard = shard};
    layout.parallel.layout.dp = size;
    layout.parallel.layout.ep = ep;
    return layout;
  }
  Settings settings(const std::string& run) const {
    Settings settings = testing::settings_for_layouts(folder_);
    settings.run.folder = (folder_ / run).string();
    settings.train.global_batch = 8;
    return settings;
  }
  static void expect_near(const testing::RunEnd& found, const testing::RunEnd& expected) {
    ASSERT_EQ(found.losses.size(), expected.losses.size());
    for (size_t i = 0; i < found.losses.size(); ++i)
      EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << i;
    ASSERT_EQ(found.weights.size(), expected.weights.size());
    double worst = 0;
    for (size_t i = 0; i < found.weights.size(); ++i)
      worst = std::max<double>(worst, std::abs(found.weights[i] - expected.weights[i]));
    EXPECT_LT(worst, 1e-4);
  }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("tessera-gpus-test-");
};

struct Sharding {
  const char* name;
  ShardSettings shard;
};

std::vector<Sharding> shardings() {
  return {{"all hold all", {.scope = ShardScope::kNone}},
          {"state", {.scope = ShardScope::kState}},
          {"small buckets", {.scope = ShardScope::kState, .bucket_bytes = 2000}},
          {"full", {.scope = ShardScope::kFull}}};
}

TEST_F(SeveralGpus, DataParallelRunsAreThoseOfOneGpu) {
  const testing::RunEnd one =
      testing::run_steps(settings("one"), data_parallel(1, {}), 3, false, choose_gpu);
  for (const int64_t size : {2, 4}) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(fmt::format("{} GPUs, {}", size, sharding.name));
      expect_near(testing::run_steps(settings("several"), data_parallel(size, sharding.shard), 3,
                                     false, choose_gpu),
                  one);
    }
  }
}

/// Two runs give the same bits, and so does one that was saved and continued.
TEST_F(SeveralGpus, RepeatAndContinueBitwise) {
  for (const Sharding& sharding : shardings()) {
    SCOPED_TRACE(sharding.name);
    const auto layout = data_parallel(std::min<int64_t>(count_ranks(), 4), sharding.shard);
    const std::string folder = fmt::format("continued {}", sharding.name);
    const auto whole = testing::run_steps(settings("whole"), layout, 3, false, choose_gpu);
    const auto again = testing::run_steps(settings("whole"), layout, 3, false, choose_gpu);
    EXPECT_EQ(again.losses, whole.losses);
    EXPECT_EQ(again.weights, whole.weights);
    testing::run_steps(settings(folder), layout, 2, true, choose_gpu);
    const auto last = testing::run_steps(settings(folder), layout, 3, false, choose_gpu);
    EXPECT_EQ(last.losses, std::vector(whole.losses.begin() + 2, whole.losses.end()));
    EXPECT_EQ(last.weights, whole.weights);
  }
}

/// Tokens that travel with padding, or whose numbers the GPUs alone know, dropless and with a
/// capacity, narrow and wide: no bit differs.
TEST_F(SeveralGpus, OtherExchangesGiveTheBitsOfExactOnes) {
  const int64_t narrow = settings("exchanged").model.hidden_size;
  for (const auto& [capacity, width] :
       {std::pair(0.0, narrow), std::pair(1.25, narrow), std::pair(0.0, int64_t{256})}) {
    SCOPED_TRACE(fmt::format("capacity {}, width {}", capacity, width));
    Settings own = settings("exchanged");
    own.model.moe.capacity_factor = capacity;
    own.model.hidden_size = width;
    for (const DispatcherRequest dispatcher :
         {DispatcherRequest::kAllToAll, DispatcherRequest::kDeduplicated}) {
      const auto run = [&](ExchangeSizes exchange) {
        auto layout = data_parallel(2, {}, 2);
        layout.parallel.dispatcher = dispatcher;
        layout.parallel.exchange = exchange;
        return testing::run_steps(own, layout, 3, false, choose_gpu);
      };
      const testing::RunEnd exact = run(ExchangeSizes::kExact);
      for (const ExchangeSizes exchange : {ExchangeSizes::kBounded, ExchangeSizes::kDirect})
        testing::expect_same_end(run(exchange), exact);
    }
  }
}

/// Rows of halves among them.
TEST_F(SeveralGpus, OtherExchangesOfHalvesGiveTheBitsOfExactOnes) {
  Settings own = settings("exchanged-halves");
  own.train.precision = Precision::kFp16;
  own.model.hidden_size = 256;
  const auto run = [&](ExchangeSizes exchange) {
    auto layout = data_parallel(2, {}, 2);
    layout.parallel.exchange = exchange;
    return testing::run_steps(own, layout, 3, false, choose_gpu);
  };
  const testing::RunEnd exact = run(ExchangeSizes::kExact);
  for (const ExchangeSizes exchange : {ExchangeSizes::kBounded, ExchangeSizes::kDirect})
    testing::expect_same_end(run(exchange), exact);
}

/// Rows that wait in pages, also such that find no room at first, whose steps are done again;
/// recorded and not.
TEST_F(SeveralGpus, StashedRowsGiveTheBitsOfMemoryForTheWorst) {
  Settings own = settings("stashed");
  own.model.moe.fuse_gather = GatherFusion::kNever;
  own.model.moe.num_experts = 8;
  own.train.stash_page = 1;
  for (const ExchangeSizes exchange : {ExchangeSizes::kBounded, ExchangeSizes::kDirect}) {
    for (const DispatcherRequest dispatcher :
         {DispatcherRequest::kAllToAll, DispatcherRequest::kDeduplicated}) {
      auto layout = data_parallel(2, {}, 2);
      layout.parallel.dispatcher = dispatcher;
      layout.parallel.exchange = exchange;
      own.train.stash = StashMode::kNone;
      const testing::RunEnd kept = testing::run_steps(own, layout, 4, false, choose_gpu);
      own.train.stash = StashMode::kAuto;
      for (const GraphMode graphs : {GraphMode::kAuto, GraphMode::kOff}) {
        for (const double factor : {1.0, 1.6}) {
          own.run.cuda_graphs = graphs;
          own.train.stash_factor = factor;
          testing::expect_same_end(testing::run_steps(own, layout, 4, false, choose_gpu), kept);
        }
      }
      own.run.cuda_graphs = GraphMode::kAuto;
    }
  }
}

/// A checkpoint of several GPUs continues on one, and on the host.
TEST_F(SeveralGpus, CheckpointsMoveToOtherDevices) {
  const auto full = data_parallel(2, {.scope = ShardScope::kFull});
  const testing::RunEnd one =
      testing::run_steps(settings("one"), data_parallel(1, {}), 3, false, choose_gpu);
  testing::run_steps(settings("saved"), full, 2, true, choose_gpu);
  for (const DeviceChooser& choose : {DeviceChooser(choose_gpu), DeviceChooser(choose_host)}) {
    const auto end = testing::run_steps(settings("saved"), data_parallel(1, {}), 3, false, choose);
    expect_near(end, {{one.losses[2]}, one.weights});
  }
}

/// Gradients that travel as BF16, in one piece and in several.
TEST_F(SeveralGpus, CompressedGradientsAgreeWithinTheirRounding) {
  for (const Sharding& sharding : shardings()) {
    SCOPED_TRACE(sharding.name);
    Settings own = without_data(settings("compressed"));
    own.shard = sharding.shard;
    own.shard.compression = GradientCompression::kBf16;
    own.parallel.layout.dp = 2;
    const Verification result =
        verify_layout({.settings = own, .num_ranks = 2, .device = choose_gpu});
    EXPECT_TRUE(result.agrees()) << describe(result, false);
    EXPECT_GT(result.worst_gradient(), testing::kLeastRounding);
  }
}

/// Gradients that are kept in BF16, in one bucket and in several, with steps of several
/// micro-batches.
TEST_F(SeveralGpus, RoundedGradientsAgreeWithinTheirRounding) {
  for (const int64_t bucket_bytes : {int64_t{2000}, ShardSettings().bucket_bytes}) {
    for (const ShardScope scope : {ShardScope::kNone, ShardScope::kState}) {
      Settings own = without_data(settings("rounded"));
      own.shard = {.scope = scope, .bucket_bytes = bucket_bytes, .gradients = DType::kBF16};
      own.train.micro_batch = 1;
      own.parallel.layout.dp = 2;
      const Verification result =
          verify_layout({.settings = own, .num_ranks = 2, .device = choose_gpu});
      EXPECT_TRUE(result.agrees()) << describe(result, false);
      EXPECT_GT(result.worst_gradient(), testing::kLeastRounding);
    }
  }
}

/// Layers that hand a state from token to token: three of a kind before one that attends.
struct ScanLayers {
  const char* name;
  void (*set)(ModelConfig&);
};

constexpr ScanLayers kScanLayers[] = {
    {"gated delta rule",
     [](ModelConfig& m) {
       m.delta_layers = {0, 1, 2};
       m.delta = {.num_key_heads = 4, .num_value_heads = 8, .key_size = 16, .value_size = 16};
     }},
    {"Kimi delta attention",
     [](ModelConfig& m) {
       m.delta_layers = {0, 1, 2};
       m.delta = {.kind = DeltaKind::kKimi,
                  .num_key_heads = 4,
                  .num_value_heads = 4,
                  .key_size = 16,
                  .value_size = 16};
     }},
    {"Mamba-2",
     [](ModelConfig& m) {
       m.mamba_layers = {0, 1, 2};
       m.mamba = {.num_heads = 8, .head_size = 16, .num_groups = 4, .state_size = 16};
     }},
    {"gated convolutions", [](ModelConfig& m) {
       m.conv_layers = {0, 1, 2};
       m.conv = {.size = 3, .bias = true};
     }}};

/// Sequences with documents that ranks share, in every way of exchanging them.
TEST_F(SeveralGpus, SharedSequencesOfScansGiveTheGradientsOfOneGpu) {
  for (const ScanLayers& layers : kScanLayers) {
    for (const ContextExchange context : {ContextExchange::kRing, ContextExchange::kAllToAll}) {
      SCOPED_TRACE(fmt::format("{}, exchange {}", layers.name, static_cast<int>(context)));
      Settings own = without_data(settings("scans"));
      own.model.num_layers = 4;
      own.model.num_heads = 4;
      own.model.num_kv_heads = 2;
      own.model.head_size = 8;
      own.model.norm_eps = 1e-2;  // without it heads of small values turn far
      own.model.mtp_layers = 0;
      layers.set(own.model);
      own.data.sequence_length = 160;
      own.data.split_documents = true;
      own.parallel.context = context;
      own.parallel.layout = {.cp = 2, .ep = 2};
      const Verification result =
          verify_layout({.settings = own, .num_ranks = 2, .device = choose_gpu});
      EXPECT_TRUE(result.agrees()) << describe(result, false);
    }
  }
}

/// Of two ranks, whose sums come in one order: no bit differs from those of gradients that stay.
TEST_F(SeveralGpus, ReleasedGradientsGiveTheBitsOfThoseThatStay) {
  for (const int64_t ep : {1, 2}) {
    Settings own = settings("released");
    own.model.mtp_layers = 0;
    own.model.num_layers = 5;
    own.train.max_grad_norm = 0;
    own.parallel.schedule = PipelineKind::kGpipe;
    testing::NamedLayout layout = data_parallel(2, {}, ep);
    layout.parallel.schedule = PipelineKind::kGpipe;
    const testing::RunEnd kept = testing::run_steps(own, layout, 3, false, choose_gpu);
    layout.shard.release_gradients = true;
    for (const bool on_host : {false, true}) {
      layout.shard.state_on_host = on_host;
      testing::expect_same_end(testing::run_steps(own, layout, 3, false, choose_gpu), kept);
    }
  }
}

/// Of passes that are cut where they wait, with any exchange, CUDA graphs and without.
TEST_F(SeveralGpus, MergedPassesGiveTheBitsOfPassesApart) {
  struct Case {
    const char* name;
    int64_t num_ranks;
    LayoutSpec layout;
    bool graphs;
  };
  const Case cases[] = {{"experts", 2, {.ep = 2}, true},
                        {"experts, no graphs", 2, {.ep = 2}, false},
                        {"weights and experts", 2, {.tp = 2, .ep = 2}, true},
                        {"sequences", 2, {.cp = 2}, true},
                        {"stages", 2, {.pp = 2}, true},
                        {"stages and experts", 4, {.ep = 2, .pp = 2}, true}};
  for (const Case& one : cases) {
    for (const ExchangeSizes exchange : {ExchangeSizes::kExact, ExchangeSizes::kBounded}) {
      SCOPED_TRACE(fmt::format("{}, exchange {}", one.name, static_cast<int>(exchange)));
      testing::NamedLayout layout{.name = one.name, .num_ranks = one.num_ranks, .parallel = {}};
      layout.parallel.layout = one.layout;
      layout.parallel.exchange = exchange;
      Settings own = settings("merged");
      own.train.micro_batch = 1;
      own.run.cuda_graphs = one.graphs ? GraphMode::kAuto : GraphMode::kOff;
      const testing::RunEnd apart = testing::run_steps(own, layout, 4, false, choose_gpu);
      own.train.schedule = "merged";
      testing::expect_same_end(testing::run_steps(own, layout, 4, false, choose_gpu), apart);
    }
  }
}

/// Whether the back end has a kernel for everything that the layout needs.
bool runs_on_gpu(const testing::RandomLayout& layout) {
  try {
    Settings settings = layout.settings;
    settings.run.device = DeviceChoice::kCuda;
    for (int64_t rank = 0; rank < layout.num_ranks; ++rank)
      plan_rank(settings, rank, layout.num_ranks);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

/// Random models on random layouts, few, since each makes its groups anew. TESSERA_LAYOUT_SEED=n
/// runs that case alone, TESSERA_LAYOUT_SEEDS=n that many.
TEST_F(SeveralGpus, RandomLayoutsGiveTheGradientsOfOneGpu) {
  const auto from_environment = [](const char* name, uint64_t fallback) {
    const char* text = std::getenv(name);
    return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
  };
  const uint64_t one = from_environment("TESSERA_LAYOUT_SEED", 0);
  const uint64_t first = one > 0 ? one : 701;
  const uint64_t count = one > 0 ? 1 : from_environment("TESSERA_LAYOUT_SEEDS", 6);
  uint64_t refused = 0;
  double gradient = 0;
  double weight = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const testing::RandomLayout layout = testing::draw_layout(seed, count_ranks());
    if (!runs_on_gpu(layout)) {
      ++refused;
      continue;
    }
    SCOPED_TRACE(fmt::format("TESSERA_LAYOUT_SEED={}: {}", seed, testing::describe(layout)));
    const Verification result = verify_layout(
        {.settings = layout.settings, .num_ranks = layout.num_ranks, .device = choose_gpu});
    EXPECT_TRUE(result.agrees()) << describe(result, false);
    gradient = std::max(gradient, result.worst_gradient());
    weight = std::max(weight, result.worst_weight());
  }
  std::cout << fmt::format(
      "{} layouts, {} refused; worst error of gradients {:.1e}, weights {:.1e}\n", count, refused,
      gradient, weight);
}

}  // namespace
}  // namespace tessera
