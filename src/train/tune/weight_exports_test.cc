#include "train/tune/weight_exports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <sstream>
#include <thread>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/layout.h"
#include "train/metrics/jsonl.h"
#include "train/testing/tiny_run.h"
#include "train/tune/export_request.h"
#include "train/tune/tune_run.h"
#include "train/tune/vllm_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::VllmStandIn;

std::map<std::string, std::string> read_folder(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder))
    files[entry.path().filename().string()] = read_text_file(entry.path());
  return files;
}

std::vector<std::string> list_folder(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

class WeightExportsTest : public ::testing::Test {
 protected:
  Settings settings(const std::string& run) const {
    Settings own = testing::tiny_settings(folder_);
    own.data.text.clear();
    own.data.sequence_length = 24;
    own.model.moe.balance_coefficient = 0;
    own.run.folder = folder_.file(run);
    own.run.report = own.run.tensorboard = false;
    own.train.validation_interval = 0;
    own.train.objective = Objective::kGrpo;
    own.schedule.warmup_steps = 0;
    own.rl.task = "digits";
    own.rl.max_tokens = 8;
    own.rl.group_size = 4;
    own.train.micro_batch = 4;
    own.train.global_batch = 8;
    own.train.steps = own.schedule.num_steps = 4;
    return own;
  }
  Settings exporting(const std::string& run) const {
    Settings own = settings(run);
    own.rl.exports.folder = folder_.file(run + "-weights");
    return own;
  }
  std::vector<StepRecord> run(const Settings& settings) {
    TrainRequest request{
        .settings = settings, .config_toml = "", .terminal = {}, .given_batches = true};
    request.config_toml = make_schema(request.settings).to_toml();
    train_on_rewards(request, *world_, out_);
    return records(settings);
  }
  static std::vector<StepRecord> records(const Settings& settings) {
    std::vector<StepRecord> records;
    const MetricsVisitor visitor{.step = [&](const StepRecord& r) { records.push_back(r); }};
    read_metrics(settings.run.folder + "/metrics.jsonl", visitor);
    return records;
  }
  std::string refusal(const Settings& settings) {
    try {
      run(settings);
    } catch (const UserError& error) {
      return error.what();
    }
    return "nothing was refused";
  }
  static fs::path checkpoint(const Settings& settings, int64_t step) {
    return checkpoint_folder(settings.run.folder) / step_folder_name(step);
  }
  /// What `tessera convert` makes of a checkpoint.
  fs::path convert(const Settings& settings, int64_t step, const std::string& name) const {
    const CheckpointReader reader(checkpoint(settings, step));
    ExportRequest request = request_export(checkpoint_settings(reader));
    request.model.vocab_size = resolve_vocab_size(request.model.vocab_size,
                                                  *make_tokenizer(settings.data.tokenizer_spec()));
    request.source = checkpoint(settings, step);
    request.target = folder_.file(name);
    export_hf(request);
    return request.target;
  }
  static double number(const StepRecord& record, const std::string& name) {
    for (const NamedNumber& one : record.objective) {
      if (one.name == name) return one.value;
    }
    return -1;
  }

  testing::TemporaryFolder folder_;
  std::unique_ptr<World> world_ = make_single_world();
  std::ostringstream out_;
};

TEST_F(WeightExportsTest, VersionsAreWhatConvertWrites) {
  Settings own = exporting("rl");
  own.rl.exports.interval = 2;
  own.rl.exports.keep_last = 2;
  own.run.checkpoint_interval = 2;
  own.run.keep_last = 0;
  const auto steps = run(own);
  EXPECT_THAT(list_folder(own.rl.exports.folder), ElementsAre("step-00000002", "step-00000004"));
  for (const int64_t step : {2, 4}) {
    auto found = read_folder(fs::path(own.rl.exports.folder) / step_folder_name(step));
    EXPECT_EQ(found["tessera_version.json"], fmt::format("{{\"step\": {}}}\n", step));
    found.erase("tessera_version.json");
    EXPECT_TRUE(found == read_folder(convert(own, step, fmt::format("converted-{}", step))));
    EXPECT_TRUE(found.contains("model.safetensors") && found.contains("config.json"));
  }
  // The weights that a step began with are told of by its record.
  ASSERT_EQ(steps.size(), 4U);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(number(steps[i], "export_seconds") > 0, i % 2 == 0) << i;
    EXPECT_EQ(number(steps[i], "export_failed"), i % 2 == 0 ? 0 : -1) << i;
  }
}

TEST_F(WeightExportsTest, MergesAdapters) {
  Settings base = settings("base");
  base.train.steps = base.schedule.num_steps = 1;
  run(base);
  Settings own = exporting("adapters");
  own.run.init_from = base.run.folder;
  own.model.lora.rank = 4;
  run(own);
  auto found = read_folder(fs::path(own.rl.exports.folder) / step_folder_name(4));
  found.erase("tessera_version.json");
  EXPECT_TRUE(found == read_folder(convert(own, 4, "converted")));
}

TEST_F(WeightExportsTest, LeavesTheRunsBits) {
  const Settings plain = settings("plain");
  const auto expected = run(plain);
  const Settings own = exporting("exporting");
  const auto found = run(own);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i].loss, expected[i].loss);
  const auto weights_of = [](const Settings& settings) {
    auto files = read_folder(checkpoint(settings, 4));
    std::erase_if(files, [](const auto& file) { return !file.first.ends_with(".safetensors"); });
    return files;
  };
  EXPECT_EQ(weights_of(own).size(), 2U);
  EXPECT_TRUE(weights_of(own) == weights_of(plain));
}

/// Whatever a reader finds under the name of a version is whole, for as long as it is there.
TEST_F(WeightExportsTest, ReadersSeeWholeVersions) {
  Settings own = exporting("rl");
  own.rl.exports.keep_last = 1;
  own.train.steps = own.schedule.num_steps = 8;
  own.run.checkpoint_interval = 0;
  std::atomic<bool> is_done = false;
  int64_t num_read = 0;
  std::thread reader([&] {
    while (!is_done) {
      std::error_code error;
      for (fs::directory_iterator it(own.rl.exports.folder, error), end; !error && it != end;
           it.increment(error)) {
        if (!it->path().filename().string().starts_with("step-")) continue;
        try {
          const SafetensorsReader file(it->path() / "model.safetensors");
          EXPECT_GT(file.file_bytes().size(), 10000U);
          ++num_read;
        } catch (const UserError& wrong) {
          EXPECT_FALSE(fs::exists(it->path())) << wrong.what();
        }
      }
    }
  });
  run(own);
  is_done = true;
  reader.join();
  EXPECT_GT(num_read, 0);
  EXPECT_THAT(list_folder(own.rl.exports.folder), ElementsAre("step-00000008"));
}

/// Steps that are done again have their versions made again; what is not a version stays.
TEST_F(WeightExportsTest, ContinuesItsVersions) {
  Settings own = exporting("rl");
  own.rl.exports.keep_last = 10;
  own.run.checkpoint_interval = 2;
  own.run.keep_last = 0;
  run(own);
  const auto whole = read_folder(fs::path(own.rl.exports.folder) / step_folder_name(4));
  fs::remove_all(checkpoint(own, 4));
  fs::create_directories(fs::path(own.rl.exports.folder) / ".tmp-step-00000004-1-2");
  fs::create_directories(fs::path(own.rl.exports.folder) / "step-00000009");
  run(own);
  EXPECT_THAT(list_folder(own.rl.exports.folder),
              ElementsAre("step-00000000", "step-00000001", "step-00000002", "step-00000003",
                          "step-00000004", "step-00000009"));
  EXPECT_TRUE(whole == read_folder(fs::path(own.rl.exports.folder) / step_folder_name(4)));
}

TEST_F(WeightExportsTest, RefusesWhatCannotBeHandedOver) {
  Settings own = exporting("rl");
  own.model.moe.zero_experts = 1;
  EXPECT_THAT(refusal(own), HasSubstr("zero_experts"));
  EXPECT_TRUE(records(own).empty());

  own = exporting("like");
  own.rl.exports.like = folder_.file("nowhere");
  EXPECT_THAT(refusal(own), HasSubstr("has no config.json"));

  own = exporting("shared");
  const VersionFolder other(own.rl.exports.folder);
  EXPECT_THAT(refusal(own), HasSubstr(own.rl.exports.folder));

  own = exporting("mixed");
  own.rl.exports.folder = own.run.folder + "/../mixed/checkpoints";
  EXPECT_THAT(refusal(own), HasSubstr("is where the run has its checkpoints"));
  own.rl.exports.folder = folder_.file("others");
  make_folder(fs::path(own.rl.exports.folder) / "step-00000004");
  write_file_synced(fs::path(own.rl.exports.folder) / "step-00000004/manifest.json", "{}");
  EXPECT_THAT(refusal(own), HasSubstr("holds checkpoints of a run, such as step-00000004"));
  EXPECT_FALSE(path_exists(own.run.folder));

  own = settings("nothing");
  own.rl.exports.vllm_url = "http://127.0.0.1:1";
  EXPECT_THAT(refusal(own), HasSubstr("rl.export_to is empty"));
}

TEST_F(WeightExportsTest, TellsAServer) {
  VllmStandIn vllm;
  Settings own = exporting("rl");
  own.rl.exports.interval = 3;
  own.rl.exports.vllm_url = vllm.url();
  run(own);
  EXPECT_THAT(out_.str(), HasSubstr("has 2 worker(s)"));
  const auto loads = [&](int64_t step) {
    const fs::path version = fs::path(own.rl.exports.folder) / step_folder_name(step);
    return AllOf(HasSubstr("POST /collective_rpc"),
                 HasSubstr("\"weights_path\":\"" + version.string() + "\""));
  };
  const auto pauses = HasSubstr("POST /pause");
  EXPECT_THAT(vllm.take_asked(),
              ElementsAre("GET /get_world_size", pauses, loads(0), "POST /resume", pauses, loads(3),
                          "POST /resume", pauses, loads(4), "POST /resume"));
}

/// By default a run stops where its server does not take the weights, saved, and continues.
TEST_F(WeightExportsTest, StopsSavedWhereAServerFails) {
  VllmStandIn vllm;
  Settings own = exporting("rl");
  own.run.checkpoint_interval = 0;
  own.rl.exports.interval = 2;
  own.rl.exports.vllm_url = vllm.url();
  const Settings plain = settings("plain");
  const auto expected = run(plain);
  vllm.set("/get_world_size", 404, "");
  EXPECT_THAT(refusal(own), HasSubstr("VLLM_SERVER_DEV_MODE=1"));
  EXPECT_FALSE(fs::exists(own.run.folder));
  vllm.set("/get_world_size", 200, R"({"world_size": 1})");
  vllm.set("/collective_rpc", 500, R"({"error": "out of memory"})");
  EXPECT_THAT(refusal(own),
              AllOf(HasSubstr("the weights of step 0 could not be handed over"),
                    HasSubstr("status 500: out of memory"), HasSubstr("rl.export_failure")));
  vllm.set("/collective_rpc", 200, "");
  own.train.steps = own.schedule.num_steps = 4;
  run(own);
  const auto found = records(own);
  ASSERT_EQ(found.size(), 4U);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(found[i].loss, expected[i].loss);
}

TEST_F(WeightExportsTest, StopsInTheMiddleWithACheckpoint) {
  VllmStandIn vllm;
  Settings own = exporting("rl");
  own.run.checkpoint_interval = 0;
  own.rl.exports.vllm_url = vllm.url();
  vllm.fail_after("/pause", 2);
  EXPECT_THAT(refusal(own), AllOf(HasSubstr("the weights of step 2 could not be handed over"),
                                  HasSubstr("status 500: gone"), HasSubstr("The run is saved")));
  EXPECT_EQ(records(own).size(), 2U);
  vllm.set("/pause", 200, "");
  run(own);
  EXPECT_EQ(records(own).size(), 4U);
}

TEST_F(WeightExportsTest, GoesOnWhereToldTo) {
  VllmStandIn vllm;
  Settings own = exporting("rl");
  own.rl.exports.vllm_url = vllm.url();
  own.rl.exports.on_failure = ExportFailure::kGoOn;
  vllm.set("/get_world_size", 503, R"({"error": "starting"})");
  vllm.set("/pause", 503, R"({"error": "starting"})");
  const auto steps = run(own);
  ASSERT_EQ(steps.size(), 4U);
  for (const StepRecord& step : steps) EXPECT_EQ(number(step, "export_failed"), 1);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("the weights of step 2 could not be handed over"),
                                HasSubstr("the weights of step 4 could not be handed over"),
                                HasSubstr("status 503: starting")));
}

}  // namespace
}  // namespace tessera
