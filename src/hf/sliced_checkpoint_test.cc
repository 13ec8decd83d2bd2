#include <gtest/gtest.h>

#include "checkpoint/slicing_testing.h"
#include "hf/convert_testing.h"
#include "hf/upcycle.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Most tensors are in several pieces, and these in several files.
void expect_in_pieces(const fs::path& folder) {
  int64_t num_pieces = 0;
  const CheckpointReader reader(folder);
  for (const auto& [name, record] : reader.manifest().tensors) {
    num_pieces += std::ssize(record.pieces);
  }
  EXPECT_GT(num_pieces, 2 * std::ssize(reader.manifest().tensors));
}

class SlicedExport : public ::testing::TestWithParam<std::string> {
 protected:
  ScratchFolder scratch_;
};

TEST_P(SlicedExport, GivesBackEveryByte) {
  import_plain(hf_fixture(GetParam()), scratch_ / "own");
  const ModelConfig model = fixture_config(GetParam()).model;
  for (const int64_t num_ranks : {3, 8}) {
    const fs::path root = scratch_ / fmt::format("sliced-{}", num_ranks);
    const fs::path sliced = save_sliced(scratch_ / "own", root, num_ranks, 1);
    expect_in_pieces(sliced);
    const fs::path back = scratch_ / fmt::format("back-{}", num_ranks);
    const ConvertReport report = export_plain(sliced, back, model, DType::kF32);
    EXPECT_EQ(report.num_verified, report.num_source_tensors);
    EXPECT_EQ(read_loose(back), read_loose(hf_fixture(GetParam())));
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, SlicedExport,
                         ::testing::Values("llama", "mixtral", "deepseek_v3_mtp", "gpt_oss"),
                         [](const auto& info) { return info.param; });

TEST(SlicedCheckpoint, UpcyclesToTheSameBytes) {
  const ScratchFolder scratch;
  import_plain(hf_fixture("llama"), scratch / "own");
  const ModelConfig dense = read_hf_config(hf_fixture("llama")).model;
  const auto upcycled = [&](const fs::path& source, const std::string& target) {
    upcycle({.source = source,
             .target = scratch / target,
             .dense = dense,
             .spec = {.copies = 4, .granularity = 1, .top_k = 2},
             .state = "{}",
             .options = {}});
    return read_loose(scratch / target / "model-00000.safetensors");
  };
  EXPECT_EQ(upcycled(save_sliced(scratch / "own", scratch / "sliced", 5, 2), "from-sliced"),
            upcycled(scratch / "own", "from-whole"));
}

}  // namespace
}  // namespace tessera
