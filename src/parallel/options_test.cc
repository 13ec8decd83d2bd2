#include "parallel/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

void expect_refused(const std::function<void()>& action, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_THAT(action, ThrowsMessage<UserError>(HasSubstr(part)));
}

TEST(ParallelOptions, HeadsAreExchangedAsTheContextSays) {
  EXPECT_EQ(heads_degree({}, 4), 1);
  EXPECT_EQ(heads_degree({.context = ContextExchange::kAllToAll}, 4), 4);
  EXPECT_EQ(heads_degree({.context = ContextExchange::kHierarchical, .context_inner = 2}, 4), 2);
  EXPECT_EQ(heads_degree({.context = ContextExchange::kHierarchical, .context_inner = 4}, 4), 4);
  // One configuration for several sizes: nothing is shared where cp is 1.
  EXPECT_EQ(heads_degree({.context = ContextExchange::kHierarchical}, 1), 1);
}

TEST(ParallelOptions, RefusesAContextThatContradictsItself) {
  const auto refuses = [](ContextExchange context, int64_t inner,
                          const std::vector<std::string>& parts) {
    expect_refused([&] { heads_degree({.context = context, .context_inner = inner}, 12); }, parts);
  };
  refuses(ContextExchange::kRing, 2, {"parallel.context_inner 2", "is \"ring\"", "hierarchical"});
  refuses(ContextExchange::kAllToAll, 2, {"parallel.context_inner 2", "is \"all_to_all\""});
  refuses(ContextExchange::kHierarchical, 5, {"5 does not divide parallel.cp 12", "4 or 6"});
  refuses(ContextExchange::kHierarchical, 1, {"parallel.context_inner 1", "divisor", "12"});
}

TEST(ParallelOptions, NodesAreCrossedAsTheDispatcherSays) {
  const auto hierarchical = DispatcherRequest::kHierarchical;
  EXPECT_EQ(dispatch_nodes({}, 8), 1);
  EXPECT_EQ(dispatch_nodes({.dispatcher = hierarchical, .dispatch_inner = 2}, 8), 4);
  EXPECT_EQ(dispatch_nodes({.dispatcher = hierarchical, .dispatch_inner = 8}, 8), 1);
  EXPECT_EQ(dispatch_nodes({.dispatcher = hierarchical}, 1), 1);
}

TEST(ParallelOptions, RefusesADispatcherThatContradictsItself) {
  const auto refuses = [](DispatcherRequest dispatcher, int64_t inner,
                          const std::vector<std::string>& parts) {
    expect_refused([&] { dispatch_nodes({.dispatcher = dispatcher, .dispatch_inner = inner}, 12); },
                   parts);
  };
  refuses(DispatcherRequest::kAuto, 2, {"parallel.dispatch_inner 2", "\"hierarchical\""});
  refuses(DispatcherRequest::kDeduplicated, 2, {"parallel.dispatch_inner 2"});
  refuses(DispatcherRequest::kHierarchical, 5, {"5 does not divide parallel.ep 12", "4 or 6"});
  refuses(DispatcherRequest::kHierarchical, 1, {"parallel.dispatch_inner 1", "ep 12", "dedup"});
}

TEST(ParallelOptions, RefusesChunksThatTheStagesOrTheScheduleDoNotAllow) {
  const auto refuses = [](const ParallelSpec& parallel, const std::vector<std::string>& parts) {
    expect_refused([&] { make_pipeline_layout(parallel, {.decoder = 8}); }, parts);
  };
  ParallelSpec parallel{.schedule = PipelineKind::kInterleaved, .chunks_per_stage = 2};
  refuses(parallel, {"2 chunks in a pipeline of one stage", "parallel.pp to 2 or more",
                     "parallel.pipeline_chunks = 1"});
  parallel = {.schedule = PipelineKind::kInterleaved, .pipeline_layout = "Et|t*7L"};
  refuses(parallel, {"2 chunks in a pipeline of one stage", "\"|\" in parallel.pipeline_layout"});
  parallel = {.layout = {.pp = 2}, .schedule = PipelineKind::kInterleaved};
  refuses(parallel, {"interleaved", "parallel.pipeline_chunks to 2 or more", "\"1f1b\""});
  parallel.chunks_per_stage = 2;
  EXPECT_EQ(make_pipeline_layout(parallel, {.decoder = 8}).chunks.size(), 4);
  // One configuration for several sizes: a schedule of one stage is any.
  EXPECT_EQ(make_pipeline_layout({.schedule = PipelineKind::kInterleaved}, {.decoder = 8})
                .chunks_per_stage(),
            1);
}

}  // namespace
}  // namespace tessera
