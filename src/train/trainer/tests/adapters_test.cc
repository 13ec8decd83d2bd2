// Runs that train low-rank adapters alone, from the checkpoint of a whole model.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/planned_world.h"
#include "hf/convert.h"
#include "hf/tensors/hf_tensors.h"
#include "hf/transfer/elements.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/state/checkpointing.h"
#include "train/testing/layout_runs.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using testing::expect_same_state;
using ::testing::HasSubstr;
using testing::make_trainer;
using testing::NamedLayout;
using testing::RunEnd;
using ::testing::ThrowsMessage;

using Weights = std::map<std::string, std::vector<std::byte>>;

Weights copy_weights_of(Trainer& trainer) {
  Weights weights;
  for (const NamedSlice& slice : trainer.state().owned_model()) {
    const HostTensor host(slice.tensor, HostTensor::Access::kRead);
    const auto* const bytes = static_cast<const std::byte*>(host.get().data);
    weights[slice.name].assign(bytes, bytes + host.get().num_bytes());
  }
  return weights;
}

class Adapters : public ::testing::Test {
 protected:
  /// Of a run that is to start from the base.
  Settings settings(const std::string& name, Precision precision = Precision::kF32) const {
    Settings settings = testing::tiny_settings(folder_);
    settings.model.vocab_size = 320;
    settings.model.qk_norm = QkNorm::kHead;
    settings.model.moe.first_dense_layers = 1;
    settings.train.precision = precision;
    settings.run.folder = folder_.file(name);
    return settings;
  }

  /// The folder of a whole model's run of two steps, and what it scores.
  std::string train_base(Precision precision = Precision::kF32) {
    const Settings base = settings("base", precision);
    const auto trainer = make_trainer(base);
    for (int step = 0; step < 2; ++step) trainer->step();
    trainer->save(make_schema_text(base));
    base_loss_ = trainer->validate();
    return base.run.folder;
  }

  Settings adapting(const std::string& name, const std::string& from,
                    Precision precision = Precision::kF32) const {
    Settings result = settings(name, precision);
    result.run.init_from = from;
    result.model.lora = {.rank = 4, .alpha = 8};
    return result;
  }

  static std::string make_schema_text(Settings settings) { return make_schema(settings).to_toml(); }

  testing::TemporaryFolder folder_;
  double base_loss_ = 0;
};

TEST_F(Adapters, BeginWithTheLossOfTheBaseAndAreAllThatIsTrained) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const std::string base = train_base(precision);
    const auto trainer = make_trainer(adapting("lora", base, precision));
    EXPECT_EQ(trainer->validate(), base_loss_);
    const Weights before = copy_weights_of(*trainer);
    for (int step = 0; step < 4; ++step) trainer->step();
    int64_t num_trained = 0;
    for (const auto& [name, bytes] : copy_weights_of(*trainer)) {
      num_trained += is_adapter_parameter(name) ? 1 : 0;
      EXPECT_EQ(bytes != before.at(name), is_adapter_parameter(name)) << name;
    }
    // Four matrices of attention in two layers, two of the MLP and of the experts.
    EXPECT_EQ(num_trained, 2 * (2 * 4 + 2 + 2));
    for (const NamedSlice& slice : trainer->state().owned_optimizer())
      EXPECT_THAT(slice.name, HasSubstr(".lora_"));
    EXPECT_LT(trainer->validate(), base_loss_);
    std::filesystem::remove_all(base);
  }
}

TEST_F(Adapters, ResumedRunIsTheUnbrokenOne) {
  const std::string base = train_base();
  const auto unbroken = make_trainer(adapting("unbroken", base));
  for (int step = 0; step < 4; ++step) unbroken->step();
  const Settings broken = adapting("broken", base);
  const auto first = make_trainer(broken);
  for (int step = 0; step < 2; ++step) first->step();
  first->save(make_schema_text(broken));
  const auto second = make_trainer(broken);
  EXPECT_EQ(second->position().step, 2);
  for (int step = 0; step < 2; ++step) second->step();
  expect_same_state(*second, *unbroken);
}

TEST_F(Adapters, TakeLessMemoryAsPredicted) {
  const std::string base = train_base(Precision::kBF16);
  const Settings adapted = adapting("lora", base, Precision::kBF16);
  const RunLayout layout = make_run_layout(adapted, *make_single_world());
  const ModelState::Bytes whole =
      ModelState::count_bytes(settings("base", Precision::kBF16), layout);
  const ModelState::Bytes found = make_trainer(adapted)->state().bytes();
  EXPECT_EQ(found, ModelState::count_bytes(adapted, layout));
  EXPECT_LT(found.gradients + found.optimizer, (whole.gradients + whole.optimizer) / 3);
  EXPECT_LT(found.weights, whole.weights * 3 / 2);
}

/// Merged by an export, which an import reads back, the model is the same to rounding.
TEST_F(Adapters, MergedModelScoresAndWritesAsTheAdaptedOne) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const std::string base = train_base(precision);
    const Settings run = adapting("lora", base, precision);
    const auto trainer = make_trainer(run);
    for (int step = 0; step < 6; ++step) trainer->step();
    trainer->save(make_schema_text(run));
    LoadedModel adapted(run.run.folder, DeviceChoice::kCpu);
    const ConvertReport report = export_hf({.source = adapted.path(),
                                            .target = folder_.file("hf"),
                                            .model = adapted.settings().model,
                                            .model_dtype = run.train.dtype(),
                                            .family = {},
                                            .like = {},
                                            .fused_experts = {},
                                            .options = {}});
    EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("adapters of rank 4 are merged")));
    import_hf({.source = folder_.file("hf"),
               .target = folder_.file("merged"),
               .options = {},
               .make_state = [&](const ImportedConfig& config, DType) {
                 Settings merged = run;
                 merged.model = config.model;
                 return fresh_state(make_schema_text(merged));
               }});
    LoadedModel merged(folder_.file("merged"), DeviceChoice::kCpu);
    EXPECT_FALSE(merged.settings().model.lora.is_on());
    const double loss = evaluate(adapted, {.max_batches = 4}).loss;
    const double tolerance = precision == Precision::kF32 ? 1e-5 : 1e-2;
    EXPECT_NEAR(evaluate(merged, {.max_batches = 4}).loss, loss, tolerance * loss);
    const auto write = [](LoadedModel& model) {
      Generator generator(model.settings().model, model.settings().train.dtype(), model.backend(),
                          model.parameters(), model.experts());
      return generator
          .generate_text(model.tokenizer(), "the cat", {.max_tokens = 8, .temperature = 0})
          .text;
    };
    if (precision == Precision::kF32) {
      EXPECT_EQ(write(merged), write(adapted));
    }
    for (const char* name : {"base", "lora", "hf", "merged"})
      std::filesystem::remove_all(folder_.file(name));
  }
}

std::vector<float> floats_of(const HfTensors& tensors, const std::string& name) {
  const HfTensor& tensor = tensors.all().at(name);
  std::vector<float> values(static_cast<size_t>(tensor.entry->shape.num_elements()));
  convert_elements(tensor.bytes().data(), tensor.entry->dtype,
                   std::as_writable_bytes(std::span(values)).data(), DType::kF32,
                   std::ssize(values));
  return values;
}

/// What PEFT makes of the adapters alone, W + alpha / r · B A of each module, is the merged model.
TEST_F(Adapters, AsPeftsMakeTheMergedModel) {
  const std::string base = train_base();
  const Settings run = adapting("lora", base);
  const auto trainer = make_trainer(run);
  for (int step = 0; step < 4; ++step) trainer->step();
  trainer->save(make_schema_text(run));
  const LoadedModel adapted(run.run.folder, DeviceChoice::kCpu);
  const LoadedModel whole(base, DeviceChoice::kCpu);
  const auto write = [&](const LoadedModel& model, const std::string& name, bool adapters) {
    export_hf({.source = model.path(),
               .target = folder_.file(name),
               .model = model.settings().model,
               .family = {},
               .like = {},
               .adapters_only = adapters,
               .fused_experts = {},
               .options = {}});
    return folder_.file(name);
  };
  const HfTensors before(write(whole, "before", false));
  const HfTensors merged(write(adapted, "merged", false));
  const std::string peft = write(adapted, "peft", true);
  const auto config = nlohmann::json::parse(read_text_file(peft + "/adapter_config.json"));
  EXPECT_EQ(config["r"], 4);
  EXPECT_EQ(config["lora_alpha"], 8);
  const SafetensorsReader adapters(peft + "/adapter_model.safetensors");
  int64_t num_modules = 0;
  for (const auto& [name, tensor] : before.all()) {
    std::vector<float> expected = floats_of(before, name);
    const std::string module = name.substr(0, name.size() - std::string(".weight").size());
    const auto modules = config["target_modules"].get<std::vector<std::string>>();
    if (std::ranges::find(modules, module) != modules.end()) {
      ++num_modules;
      const Shape& shape = tensor.entry->shape;
      const OwnedTensor a(DType::kF32, {4, shape[1]});
      const OwnedTensor b(DType::kF32, {shape[0], 4});
      adapters.read(fmt::format("base_model.model.{}.lora_A.weight", module), a);
      adapters.read(fmt::format("base_model.model.{}.lora_B.weight", module), b);
      for (int64_t i = 0; i < std::ssize(expected); ++i) {
        for (int64_t k = 0; k < 4; ++k)
          expected[i] += 2 * b.get().as<float>()[i / shape[1] * 4 + k] *
                         a.get().as<float>()[k * shape[1] + i % shape[1]];
      }
    }
    const std::vector<float> found = floats_of(merged, name);
    float error = 0;
    for (size_t i = 0; i < found.size(); ++i)
      error = std::max(error, std::abs(found[i] - expected[i]));
    EXPECT_LT(error, 1e-5F) << name;
  }
  EXPECT_EQ(num_modules, std::ssize(config["target_modules"]));
  EXPECT_GT(num_modules, 8);
}

/// Of experts PEFT may double rank and alpha; what it may leave out is said.
TEST_F(Adapters, AreWrittenWithAFactorThatPeftKeeps) {
  const std::string base = train_base();
  const auto check = [&](const std::string& target, double alpha, bool rank_stabilized) {
    Settings run = adapting(target, base);
    run.model.lora.rank_stabilized = true;
    run.model.lora.targets = {target};
    const auto trainer = make_trainer(run);
    trainer->step();
    trainer->save(make_schema_text(run));
    const LoadedModel model(run.run.folder, DeviceChoice::kCpu);
    const std::string folder = folder_.file("peft-" + target);
    const ConvertReport report = export_hf({.source = model.path(),
                                            .target = folder,
                                            .model = model.settings().model,
                                            .family = {},
                                            .like = {},
                                            .adapters_only = true,
                                            .fused_experts = {},
                                            .options = {}});
    const auto config = nlohmann::json::parse(read_text_file(folder + "/adapter_config.json"));
    EXPECT_EQ(config["lora_alpha"], alpha) << target;
    EXPECT_EQ(config["use_rslora"], rank_stabilized) << target;
    const bool warns = std::ranges::any_of(report.notes, [](const std::string& note) {
      return note.find("PEFT") != std::string::npos;
    });
    EXPECT_EQ(warns, target != "attn") << target;
  };
  check("attn", 8, true);
  check("mlp", 8, true);
  check("moe.experts", 16, false);  // 8 / sqrt(4) = 16 / 4
}

TEST_F(Adapters, AreNeitherLostNorOfRandomWeights) {
  const std::string base = train_base();
  const Settings run = adapting("lora", base);
  const auto trainer = make_trainer(run);
  trainer->step();
  trainer->save(make_schema_text(run));
  Settings whole = settings("whole");
  whole.run.init_from = run.run.folder;
  EXPECT_THAT([&] { make_trainer(whole); },
              ThrowsMessage<UserError>(HasSubstr("has low-rank adapters")));
  // With adapters of its own the run trains them on.
  const auto second = make_trainer(adapting("second", run.run.folder));
  EXPECT_EQ(copy_weights_of(*second), copy_weights_of(*trainer));
  EXPECT_THAT([&] { make_trainer(adapting("random", "")); },
              ThrowsMessage<UserError>(HasSubstr("run.init_from is empty")));
}

/// With another factor the same matrices are another model.
TEST_F(Adapters, AreNotScaledAnew) {
  const Settings run = adapting("lora", train_base());
  const auto trainer = make_trainer(run);
  trainer->step();
  trainer->save(make_schema_text(run));
  Settings scaled = adapting("scaled", run.run.folder);
  scaled.model.lora.alpha = 16;
  EXPECT_THAT([&] { make_trainer(scaled); },
              ThrowsMessage<UserError>(HasSubstr("adapters of lora.alpha 8")));
  scaled = adapting("stabilized", run.run.folder);
  scaled.model.lora.rank_stabilized = true;
  EXPECT_THAT([&] { make_trainer(scaled); },
              ThrowsMessage<UserError>(HasSubstr("set [lora] as that run has it")));
}

TEST_F(Adapters, RefuseWhatDoesNotGoTogether) {
  const auto refused = [&](const std::function<void(Settings&)>& change, const char* text) {
    Settings run = adapting("lora", "base");
    change(run);
    EXPECT_THAT([&] { validate(run); }, ThrowsMessage<UserError>(HasSubstr(text)));
  };
  refused([](Settings& s) { s.train.precision = Precision::kFp8; }, "train.precision = \"fp8\"");
  refused([](Settings& s) { s.optimizer_kind = OptimizerKind::kMuon; }, "optim.name = \"muon\"");
  refused([](Settings& s) { s.qk_clip = 10; }, "optim.qk_clip");
  refused([](Settings& s) { s.shard.scope = ShardScope::kFull; }, "optim.shard = \"full\"");
  refused([](Settings& s) { s.parallel.clone_experts = 1; }, "parallel.clone_experts");
}

class AdapterLayouts : public ::testing::Test {
 protected:
  AdapterLayouts() {
    Settings base = testing::settings_for_layouts(folder_.file(""));
    base.model.mtp_layers = 0;
    base.run.folder = folder_.file("base");
    testing::run_steps(base, kOne, 1, true);
    settings_ = base;
    settings_.run.init_from = base.run.folder;
    settings_.model.lora = {.rank = 3, .alpha = 6};
  }

  RunEnd run(const NamedLayout& layout, const std::string& name, int64_t steps, bool save = false) {
    settings_.run.folder = folder_.file(name);
    return testing::run_steps(settings_, layout, steps, save);
  }

  static void expect_near(const RunEnd& found, const RunEnd& expected) {
    ASSERT_EQ(found.losses.size(), expected.losses.size());
    for (size_t i = 0; i < found.losses.size(); ++i)
      EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-4 * expected.losses[i]) << "step " << i;
    ASSERT_EQ(found.weights.size(), expected.weights.size());
    float error = 0;
    for (size_t i = 0; i < found.weights.size(); ++i)
      error = std::max(error, std::abs(found.weights[i] - expected.weights[i]));
    EXPECT_LT(error, 1e-3F);
  }

  const NamedLayout kOne = {.name = "one", .parallel = {}};
  testing::TemporaryFolder folder_;
  Settings settings_;
};

TEST_F(AdapterLayouts, TrainAsOneRank) {
  const RunEnd one = run(kOne, "one", 3);
  std::vector<NamedLayout> layouts = {{"dp2", 2, {}},       {"tp2", 2, {}},   {"cp2", 2, {}},
                                      {"pp2", 2, {}},       {"ep2", 2, {}},   {"unsharded", 2, {}},
                                      {"bf16_sums", 2, {}}, {"folded", 8, {}}};
  layouts[1].parallel.layout.tp = 2;
  layouts[2].parallel.layout.cp = 2;
  layouts[3].parallel.layout.pp = 2;
  layouts[4].parallel.layout.ep = 2;
  layouts[5].shard.scope = ShardScope::kNone;
  layouts[6].shard.gradients = DType::kBF16;
  layouts[7].parallel.layout.tp = 2;
  layouts[7].parallel.layout.cp = 2;
  layouts[7].parallel.layout.pp = 2;
  layouts[7].parallel.layout.ep = 4;
  for (const NamedLayout& layout : layouts) {
    SCOPED_TRACE(layout.name);
    const bool rounds = layout.shard.gradients == DType::kBF16;
    const RunEnd end = run(layout, layout.name, 3);
    if (rounds) {
      EXPECT_NEAR(end.losses.back(), one.losses.back(), 1e-3 * one.losses.back());
    } else {
      expect_near(end, one);
    }
  }
}

TEST_F(AdapterLayouts, ContinueEachOther) {
  const RunEnd one = run(kOne, "one", 4);
  NamedLayout dp = {"dp3", 3, {}};
  NamedLayout folded = {"tp2pp2", 4, {}};
  folded.parallel.layout.tp = 2;
  folded.parallel.layout.pp = 2;
  run(dp, "changed", 1, true);
  run(folded, "changed", 2, true);
  RunEnd end = run(kOne, "changed", 4);
  end.losses.insert(end.losses.begin(), one.losses.begin(), one.losses.begin() + 2);
  expect_near(end, one);
}

TEST_F(AdapterLayouts, RefuseSpreadExperts) {
  NamedLayout etp = {"etp2", 2, {}};
  etp.parallel.layout.tp = 2;
  etp.parallel.layout.etp = 2;
  EXPECT_THAT([&] { run(etp, "etp", 1); },
              ThrowsMessage<UserError>(HasSubstr("parallel.etp is 2, but experts with adapters")));
  settings_.model.lora.targets = {"attn", "moe.shared"};
  const RunEnd one = run(kOne, "one", 2);
  expect_near(run(etp, "etp", 2), one);
}

}  // namespace
}  // namespace tessera
