// Runs whose weights are FP8 numbers, cast from the masters (precision.primary_weights).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "model/proof/prove_stage.h"
#include "ops/dequantize/dequantize_testing.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"
#include "train/infer/loaded_model.h"
#include "train/memory/planned_rank.h"
#include "train/testing/layout_runs.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;

const NamedLayout kOne{"one"};

class PrimaryWeights : public ::testing::Test {
 protected:
  /// Queries, outputs and experts are of whole blocks, keys, values and the shared expert are not.
  Settings settings(const std::string& run) const {
    Settings settings = testing::settings_for_layouts(folder_.file(""));
    settings.run.folder = folder_.file(run);
    settings.model.mtp_layers = 0;
    settings.model.hidden_size = 128;
    settings.model.head_size = 32;
    settings.model.inner_size = 128;
    settings.model.moe.inner_size = 128;
    settings.model.moe.shared_inner_size = 64;
    settings.model.init_deviation = 0.05;
    settings.train.global_batch = 2;
    settings.train.max_grad_norm = 0;
    settings.schedule.peak_lr = 1e-3;
    settings.train.precision = Precision::kFp8;
    settings.precision.fp8_weights = true;
    return settings;
  }
  RunEnd run(const std::string& name, const NamedLayout& layout, int64_t steps, bool save) const {
    return testing::run_steps(settings(name), layout, steps, save);
  }
  const TemporaryFolder folder_;
};

std::vector<float> floats_of(const Tensor& tensor) {
  const HostTensor host(tensor, HostTensor::Access::kRead);
  const std::vector<double> values = testing::to_doubles(host.get());
  return {values.begin(), values.end()};
}

/// What a weight stands for, whatever it is stored as.
OwnedTensor values_of(const ModelParameter& parameter) {
  if (parameter.spec.is_fp8()) return testing::dequantize(parameter.weight, DType::kBF16);
  OwnedTensor values(parameter.weight.dtype, parameter.weight.shape);
  host_device().copy(values.get().data, parameter.weight.data, parameter.weight.num_bytes());
  return values;
}

TEST_F(PrimaryWeights, AreTheirMastersCast) {
  Settings chosen = settings("run");
  chosen.model.mtp_layers = 1;
  const auto trainer = testing::make_trainer(chosen);
  int num_fp8 = 0;
  for (int64_t step = 0; step < 2; ++step) {
    for (const NamedSlice& master : trainer->state().optimizer().weight_slices(HeldPart::kOwned)) {
      const ModelParameter& parameter = trainer->state().parameters().find(master.name);
      if (!parameter.spec.is_fp8()) continue;
      ++num_fp8;
      ASSERT_EQ(master.tensor.dtype, DType::kF32);
      const auto expected =
          testing::quantize(master.tensor, {.scale = ScaleLayout::block(128, 128)});
      EXPECT_EQ(floats_of(testing::dequantize(parameter.weight, DType::kF32).get()),
                floats_of(testing::dequantize(expected.tensor, DType::kF32).get()))
          << master.name << " at step " << step;
    }
    trainer->step();
  }
  EXPECT_EQ(num_fp8, 2 * (3 * (2 + 3) + 2)) << "of three layers, and what joins tokens further on";
}

/// As far as a step: gradients of BF16 weights that are the same numbers, which are rounded to
/// themselves.
TEST_F(PrimaryWeights, MultiplyAsTheSameNumbersInBf16) {
  const auto fp8 = testing::make_trainer(settings("fp8"));
  Settings plain = settings("bf16");
  plain.precision.fp8_weights = false;
  const auto bf16 = testing::make_trainer(plain);
  for (const ModelParameter& to : bf16->state().parameters().all()) {
    const OwnedTensor values = values_of(fp8->state().parameters().find(to.spec.name));
    host_device().copy(to.weight.data, values.get().data, to.weight.num_bytes());
  }
  EXPECT_EQ(fp8->step().loss, bf16->step().loss);
  const auto found = fp8->state().optimizer().gradient_slices();
  const auto expected = bf16->state().optimizer().gradient_slices();
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_EQ(floats_of(found[i].tensor), floats_of(expected[i].tensor)) << found[i].name;
}

/// Shares end between blocks, whose scales are then those of the whole weight.
TEST_F(PrimaryWeights, LayoutsKeepTheBits) {
  const RunEnd one = run("one", kOne, 2, false);
  std::vector<NamedLayout> layouts = {
      {"dp2", 2, {.layout = {.dp = 2}}},
      {"small_buckets", 2, {.layout = {.dp = 2}}, {.bucket_bytes = 40000}},
      {"unsharded", 2, {.layout = {.dp = 2}}, {.scope = ShardScope::kNone}},
      {"pp2", 2, {.layout = {.pp = 2}}}};
  for (const NamedLayout& layout : testing::share_of_cases(layouts, 1)) {
    SCOPED_TRACE(layout.name);
    testing::expect_same_end(run(layout.name, layout, 2, false), one);
  }
  const RunEnd experts = run("ep2", {"ep2", 2, {.layout = {.dp = 2, .ep = 2}}}, 2, false);
  for (size_t i = 0; i < one.losses.size(); ++i)
    EXPECT_NEAR(experts.losses[i], one.losses[i], 0.01 * one.losses[i]);
}

/// Parts of whole blocks: each rank casts its own, and programs that turn them are proven.
TEST_F(PrimaryWeights, PartsOfWeightsLearnAsWholeOnes) {
  Settings wide = settings("wide");
  wide.model.hidden_size = 256;
  wide.model.head_size = 64;
  wide.model.num_kv_heads = 4;
  wide.model.moe.inner_size = 256;
  wide.model.moe.shared_inner_size = 256;
  wide.model.num_layers = 1;
  const NamedLayout tp2{"tp2", 2, {.layout = {.tp = 2, .etp = 2}}};
  const RunEnd one = testing::run_steps(wide, kOne, 2, false);
  wide.run.folder = folder_.file("tp2");
  const RunEnd parts = testing::run_steps(wide, tp2, 2, false, testing::choose_shadow);
  for (size_t i = 0; i < one.losses.size(); ++i)
    EXPECT_NEAR(parts.losses[i], one.losses[i], 0.01 * one.losses[i]);
  wide.parallel = tp2.parallel;
  const Backend shadow = testing::make_shadow_backend(make_cpu_kernels());
  const PlannedRank planned = plan_rank(wide, 0, 2, shadow, batch_shape(wide));
  EXPECT_TRUE(prove_stage(planned.model.programs()).faults.empty());
}

TEST_F(PrimaryWeights, RunsContinueToTheBitOnOtherLayouts) {
  const RunEnd whole = run("whole", kOne, 3, false);
  run("parts", kOne, 1, true);
  const RunEnd rest = run("parts", {"dp2", 2, {.layout = {.dp = 2}}}, 3, false);
  testing::expect_same_end(rest, {{whole.losses.begin() + 1, whole.losses.end()}, whole.weights});
}

/// On a device that the host stands for, with products in FP8 and copies that are turned.
TEST_F(PrimaryWeights, LearnAlikeWhereDevicesMultiplyFp8) {
  Settings emulated = settings("emulated");
  const RunEnd expected = testing::run_steps(emulated, kOne, 2, false);
  const RunEnd found = testing::run_steps(settings("fp8"), kOne, 2, false, testing::choose_shadow);
  EXPECT_NE(found.weights, expected.weights);
  for (size_t i = 0; i < found.losses.size(); ++i)
    EXPECT_NEAR(found.losses[i], expected.losses[i], 0.01 * expected.losses[i]);
  Settings without_copies = settings("without");
  without_copies.precision.weight_copies = false;
  testing::expect_same_end(
      testing::run_steps(without_copies, kOne, 2, false, testing::choose_shadow), found);
  testing::expect_same_end(
      testing::run_steps(settings("recorded"), kOne, 2, false, testing::choose_recording_shadow),
      found);
  Settings on_host = settings("state_on_host");
  const NamedLayout state_on_host{"state_on_host", 1, {}, {.state_on_host = true}};
  testing::expect_same_end(
      testing::run_steps(on_host, state_on_host, 2, false, testing::choose_shadow), found);
  Settings by_host = settings("updates_on_host");
  const NamedLayout updates_on_host{
      "updates_on_host", 1, {}, {.state_on_host = true, .updates_on_host = true}};
  testing::expect_same_end(
      testing::run_steps(by_host, updates_on_host, 2, false, testing::choose_shadow), found);
}

TEST_F(PrimaryWeights, TakeOneByteEachAsPredicted) {
  Settings chosen = settings("run");
  const auto fp8 = testing::make_trainer(chosen);
  EXPECT_EQ(fp8->state().bytes(), fp8->prediction().state);
  chosen.run.folder = folder_.file("bf16");
  chosen.precision.fp8_weights = false;
  const auto bf16 = testing::make_trainer(chosen);
  int64_t elements = 0;
  for (const ModelParameter& parameter : fp8->state().parameters().all())
    elements += parameter.spec.is_fp8() ? parameter.spec.shape.num_elements() : 0;
  const int64_t spared = bf16->prediction().state.weights - fp8->prediction().state.weights;
  EXPECT_GT(spared, elements * 99 / 100);
  EXPECT_LE(spared, elements);
  EXPECT_EQ(bf16->prediction().state.optimizer, fp8->prediction().state.optimizer);
}

/// The checkpoint has the masters, which are rounded to BF16 for whoever reads it, and from which
/// runs of both kinds start.
TEST_F(PrimaryWeights, CheckpointsAreReadAsOthersAre) {
  const Settings saved = settings("saved");
  const auto trainer = testing::make_trainer(saved);
  trainer->step();
  trainer->save(make_schema(const_cast<Settings&>(saved)).to_toml());
  LoadedModel model(saved.run.folder, DeviceChoice::kCpu);
  for (const NamedSlice& master : trainer->state().optimizer().weight_slices(HeldPart::kOwned)) {
    if (is_mtp_parameter(master.name)) continue;
    std::vector<float> expected = floats_of(master.tensor);
    if (model.parameters().find(master.name).weight.dtype == DType::kBF16) {
      for (float& value : expected) value = static_cast<float>(Bf16(value));
    }
    EXPECT_EQ(floats_of(model.parameters().find(master.name).weight), expected) << master.name;
  }
  Settings other = saved;
  other.precision.fp8_weights = false;
  EXPECT_THAT(
      [&] { testing::make_trainer(other); },
      ThrowsMessage<UserError>(HasSubstr("written with precision.primary_weights = \"fp8\"")));
}

TEST_F(PrimaryWeights, AreRefusedByName) {
  const auto message = [](const Settings& settings) {
    try {
      validate(settings);
      testing::make_trainer(settings);
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  Settings recipe = settings("recipe");
  recipe.precision.recipe = "rowwise";
  EXPECT_THAT(message(recipe), HasSubstr("precision.recipe \"rowwise\""));
  Settings full = settings("full");
  full.shard.scope = ShardScope::kFull;
  EXPECT_THAT(message(full), HasSubstr("optim.shard = \"full\""));
  Settings master = settings("master");
  master.optimizer.formats.master = MasterKind::kRemainder;
  EXPECT_THAT(message(master), HasSubstr("optim.master is \"remainder\""));
  Settings plain = settings("plain");
  plain.train.precision = Precision::kBF16;
  EXPECT_THAT(message(plain), HasSubstr("precision.primary_weights is set"));
  Settings none = settings("none");
  none.precision.plain = {"all"};
  EXPECT_THAT(message(none), HasSubstr("no weight is read by rounded products alone"));
  EXPECT_THAT(
      [&] {
        run("cut", {"tp2", 2, {.layout = {.tp = 2}}}, 1, false);
      },
      ThrowsMessage<UserError>(HasSubstr("parts are multiples of 128")));
}

}  // namespace
}  // namespace tessera
