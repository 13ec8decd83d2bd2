#include "train/state/run_paths.h"

#include <gtest/gtest.h>

#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class RunPaths : public ::testing::Test {
 protected:
  RunPaths() {
    make_folder(folder_.file("work/runs/first"));
    for (const char* name : {"tokenizer.json", "text.txt", "ids.idx"})
      write_file_synced(work() / name, "x");
  }
  fs::path work() const { return fs::weakly_canonical(folder_.file("work")); }
  DataSettings resolved(const std::string& named, const fs::path& run_folder) const {
    DataSettings data;
    data.text = "text.txt";
    data.tokens = "ids";
    data.tokenizer = "tokenizer.json";
    data.cache = "missing";
    resolve_data_paths(data, named, run_folder);
    return data;
  }

  testing::TemporaryFolder folder_;
};

TEST_F(RunPaths, RunsAreTwoFoldersAboveTheirCheckpoints) {
  EXPECT_EQ(run_folder_of(work() / "runs/first/checkpoints/step-00000004"), work() / "runs/first");
  EXPECT_EQ(run_folder_of(work() / "converted"), fs::path());
}

TEST_F(RunPaths, CountFromWhereTheRunWasStarted) {
  for (const char* named : {"runs/first", "./runs/first/", "runs/other/../first"}) {
    const DataSettings data = resolved(named, work() / "runs/first");
    EXPECT_EQ(data.text, (work() / "text.txt").string()) << named;
    EXPECT_EQ(data.tokens, (work() / "ids").string()) << named;
    EXPECT_EQ(data.tokenizer, (work() / "tokenizer.json").string()) << named;
    EXPECT_EQ(data.cache, "missing") << named;
  }
}

TEST_F(RunPaths, LinksLeadToTheirRuns) {
  make_folder(work() / "runs/first/checkpoints/step-00000004");
  fs::create_symlink(work() / "runs/first/checkpoints/step-00000004", work() / "best");
  EXPECT_EQ(run_folder_of(work() / "best"), work() / "runs/first");
  // A folder of runs that lies elsewhere does not say where they were started, its link does.
  make_folder(folder_.file("disk/runs/second"));
  write_file_synced(folder_.file("disk/text.txt"), "x");
  fs::create_symlink(folder_.file("disk/runs"), work() / "linked");
  EXPECT_EQ(resolved("linked/second", work() / "linked/second").text,
            (work() / "text.txt").string());
}

TEST_F(RunPaths, StayWhereTheStartIsUnknown) {
  make_folder(work() / "copy");
  for (const std::string& named : {std::string("runs/first"), (work() / "copy").string(),
                                   std::string("../copy"), std::string()}) {
    EXPECT_EQ(resolved(named, work() / "copy").tokenizer, "tokenizer.json") << named;
  }
}

}  // namespace
}  // namespace tessera
