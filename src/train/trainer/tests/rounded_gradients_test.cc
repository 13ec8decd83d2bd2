// Runs whose layers' gradients are kept in BF16, beside the plain composition of what they do.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "train/setup/replica_groups.h"
#include "train/testing/layout_runs.h"
#include "train/testing/option_families.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using testing::expect_same_state;
using ::testing::HasSubstr;
using testing::make_trainer;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

std::vector<float> as_floats(const Tensor& anywhere) {
  const HostTensor host(anywhere, HostTensor::Access::kRead);
  const Tensor& tensor = host.get();
  if (tensor.dtype == DType::kBF16) {
    const std::span<Bf16> values = tensor.span<Bf16>();
    return {values.begin(), values.end()};
  }
  const std::span<float> values = tensor.span<float>();
  return {values.begin(), values.end()};
}

using Values = std::map<std::string, std::vector<float>>;

Values values_of(const std::vector<NamedSlice>& slices) {
  Values values;
  for (const NamedSlice& slice : slices) values[slice.name] = as_floats(slice.tensor);
  return values;
}

void expect_same(const Values& found, const Values& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : found) EXPECT_TRUE(values == expected.at(name)) << name;
}

Settings rounded(Settings settings) {
  settings.shard.gradients = DType::kBF16;
  return settings;
}

bool is_of_layer(Trainer& trainer, const std::string& name) {
  return trainer.state().parameters().find(name).spec.layer.has_value();
}

/// What F32 gradients, and those of layers rounded, make of fresh weights.
Values update_with(Trainer& fresh, Values grads) {
  std::vector<Parameter> parameters;
  for (const ModelParameter& p : fresh.state().parameters().all()) {
    std::vector<float>& grad = grads.at(p.spec.name);
    parameters.push_back(
        {.name = p.spec.name, .weight = p.weight, .grad = view(std::span(grad), p.weight.shape)});
  }
  Optimizer optimizer(parameters, fresh.settings().optimizer);
  fresh.state().optimizer().change_masters([&](const NamedSlice& master) {
    optimizer.change_masters([&](size_t idx, const Tensor& own) {
      if (parameters[idx].name == master.name)
        host_device().copy(own.data, master.tensor.data, own.num_bytes());
    });
  });
  optimizer.step({.step_idx = 0,
                  .lr = learning_rate(fresh.settings().schedule, 0),
                  .max_grad_norm = fresh.settings().train.max_grad_norm});
  Values weights;
  for (const Parameter& p : parameters) weights[p.name] = as_floats(p.weight);
  return weights;
}

/// Formats of the state with and without scales.
std::vector<std::pair<Precision, StateFormats>> state_formats() {
  constexpr MomentKind kBF16 = MomentKind::kBF16;
  return {{Precision::kF32, {}},
          {Precision::kBF16, {}},
          {Precision::kBF16, {kBF16, kBF16, MasterKind::kNone}},
          {Precision::kBF16, {MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8}}};
}

/// With one micro-batch gradients are those in F32, rounded once, and updates are theirs.
TEST(RoundedGradients, OfOneMicroBatchAreRoundedOnce) {
  for (const auto& [precision, formats] : state_formats()) {
    const TemporaryFolder folder;
    Settings settings = testing::tiny_settings(folder);
    settings.train.micro_batch = settings.train.global_batch;
    settings.train.precision = precision;
    settings.optimizer.formats = formats;
    const auto plain = make_trainer(settings);
    const auto fresh = make_trainer(settings);
    const auto trainer = make_trainer(rounded(settings));
    plain->step();
    trainer->step();
    Values expected = values_of(plain->state().optimizer().gradient_slices());
    for (auto& [name, values] : expected) {
      if (!is_of_layer(*plain, name)) continue;
      for (float& value : values) value = Bf16(value);
    }
    expect_same(values_of(trainer->state().optimizer().gradient_slices()), expected);
    expect_same(values_of(trainer->state().optimizer().weight_slices(HeldPart::kOwned)),
                update_with(*fresh, expected));
  }
}

/// What the sums of one micro-batch after the other should have become, told of each task.
class SumsByHand {
 public:
  explicit SumsByHand(Trainer& trainer) : trainer_(trainer) {}

  void watch(const Task& task) {
    if (task.action != TaskAction::kRoundGradients) return;
    for (const ModelParameter& p : trainer_.state().parameters().all()) {
      if (p.spec.layer != task.subject.program.idx) continue;
      const std::vector<float> sum = as_floats(p.sum);
      const auto [found, is_new] = rounded_.try_emplace(p.spec.name, sum);
      std::vector<float>& total = exact_.try_emplace(p.spec.name, sum.size()).first->second;
      for (size_t i = 0; i < sum.size(); ++i) {
        found->second[i] = Bf16(is_new ? sum[i] : found->second[i] + sum[i]);
        total[i] += sum[i];
      }
    }
  }
  const Values& rounded() const { return rounded_; }
  const Values& exact() const { return exact_; }

 private:
  Trainer& trainer_;
  Values rounded_, exact_;
};

TEST(RoundedGradients, OfSeveralMicroBatchesAreRoundedWithEach) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.train.micro_batch = 1;
  const auto plain = make_trainer(settings);
  const auto trainer = make_trainer(rounded(settings));
  SumsByHand sums(*trainer);
  plain->step();
  trainer->step({.tasks = [&](const Task& task, auto, auto) { sums.watch(task); }});
  const Values kept = values_of(plain->state().optimizer().gradient_slices());
  const Values found = values_of(trainer->state().optimizer().gradient_slices());
  EXPECT_GT(sums.rounded().size(), 8U);
  for (const auto& [name, values] : found) {
    const bool rounds = is_of_layer(*plain, name);
    EXPECT_EQ(values, rounds ? sums.rounded().at(name) : kept.at(name)) << name;
    if (!rounds) continue;
    const float largest = std::ranges::max(kept.at(name), {}, [](float x) { return std::abs(x); });
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(sums.exact().at(name)[i], kept.at(name)[i], 1e-5 * std::abs(largest)) << name;
  }
}

class RoundedFamilies : public ::testing::TestWithParam<testing::OptionFamily> {};

/// On a device that spoils what is under way, in steps that it repeats.
TEST_P(RoundedFamilies, HaveTheSameBitsOnEveryDevice) {
  const TemporaryFolder folder;
  Settings settings = rounded(testing::settings_of(GetParam()));
  if (settings.optimizer_kind == OptimizerKind::kMuon) GTEST_SKIP() << "of AdamW alone";
  settings.run.device = DeviceChoice::kCpu;
  settings.run.folder = folder.file("run");
  settings.data.tokens = folder.file("tokens");
  settings.train.steps = settings.schedule.num_steps = 4;
  settings.shard.release_gradients = false;
  testing::write_tokens(settings);
  const std::unique_ptr<World> world = make_single_world();
  const auto make = [&](const DeviceChooser& choose) {
    TrainingData data = open_training_data(settings);
    auto trainer = std::make_unique<Trainer>(settings, std::move(data), *world, choose);
    trainer->resume("");
    return trainer;
  };
  const auto host = make(choose_host);
  ::testing::internal::CaptureStderr();
  const auto device = make(testing::choose_recording_shadow);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(device->step().loss, host->step().loss) << "step " << i + 1;
  ::testing::internal::GetCapturedStderr();
  expect_same_state(*host, *device);
}

INSTANTIATE_TEST_SUITE_P(All, RoundedFamilies,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     0)),
                         [](const auto& info) { return std::string(info.param.name); });

bool may_round(const testing::RandomLayout& layout) {
  const Settings& settings = layout.settings;
  return settings.optimizer_kind == OptimizerKind::kAdamW &&
         (settings.shard.scope != ShardScope::kFull || layout.num_ranks == 1);
}

/// Any layout computes what one rank does with F32 gradients, within roundings.
TEST(RoundedLayouts, AgreeWithOneRank) {
  int num_cases = 0;
  for (uint64_t seed = 1201; seed < 1201 + testing::share_of_count<uint64_t>(24); ++seed) {
    const testing::RandomLayout layout = testing::draw_layout(seed, 6);
    if (!may_round(layout)) continue;
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    Settings settings = rounded(layout.settings);
    settings.shard.reduce_group = 1;
    const Verification found =
        verify_layout({.settings = settings, .num_ranks = layout.num_ranks, .steps = 1});
    EXPECT_TRUE(found.agrees()) << describe(found, false);
    num_cases += layout.num_ranks > 1 ? 1 : 0;
  }
  EXPECT_GT(num_cases, testing::share_of_count(6));
}

/// Whatever the device, bucket and place of the state; and memory is what was predicted.
TEST(RoundedLayouts, HaveTheSameBitsOnEveryDevice) {
  const TemporaryFolder folder;
  int num_cases = 0;
  for (uint64_t seed = 1301; seed < 1301 + testing::share_of_count<uint64_t>(24); ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 6);
    if (!may_round(layout) || layout.num_ranks == 1) continue;
    testing::prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    Settings settings = rounded(layout.settings);
    settings.shard.reduce_group = 1;
    NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    const RunEnd host = testing::run_steps(settings, named, 2, false);
    named.shard.state_on_host = true;
    testing::expect_same_end(testing::run_steps(settings, named, 2, false, testing::choose_shadow),
                             host);
    if (settings.optimizer_kind == OptimizerKind::kAdamW) {
      named.shard.updates_on_host = true;
      testing::expect_same_end(
          testing::run_steps(settings, named, 2, false, testing::choose_shadow), host);
    }
    run_thread_world(layout.num_ranks, [&](World& world) {
      Settings own = settings;
      TrainingData data = open_training_data(own);
      Trainer trainer(own, std::move(data), world, choose_host);
      EXPECT_EQ(trainer.state().bytes(), trainer.prediction().state);
    });
    ++num_cases;
  }
  EXPECT_GT(num_cases, testing::share_of_count(4));
}

TEST(RoundedGradientsMemory, IsHalfAndTheSumsOfALayer) {
  const TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.num_layers = 8;
  const auto plain = make_trainer(settings);
  const auto trainer = make_trainer(rounded(settings));
  const ModelState::Bytes bytes = trainer->state().bytes();
  EXPECT_EQ(bytes, trainer->prediction().state);
  EXPECT_EQ(bytes.optimizer, plain->state().bytes().optimizer);
  int64_t layers = 0;
  int64_t ends = 0;
  for (const ModelParameter& p : plain->state().parameters().all())
    (p.spec.layer ? layers : ends) += align_up(p.grad.num_bytes());
  EXPECT_EQ(bytes.gradients, ends + layers / 2 + layers / 8);
}

/// Gradients are not saved: a run goes on with the same bits, and with others of the other kind.
TEST(RoundedGradients, GoOnFromCheckpoints) {
  const TemporaryFolder folder;
  const Settings settings = testing::tiny_settings(folder);
  const auto whole = make_trainer(rounded(settings));
  for (int i = 0; i < 4; ++i) whole->step();
  Settings own = rounded(settings);
  own.run.folder = folder.file("rounded");
  const auto first = make_trainer(own);
  for (int i = 0; i < 2; ++i) first->step();
  first->save("");
  const auto second = make_trainer(own);
  for (int i = 0; i < 2; ++i) second->step();
  expect_same_state(*whole, *second);
  own.shard.gradients = DType::kF32;
  const auto plain = make_trainer(own);
  EXPECT_EQ(plain->position().step, 2);
  EXPECT_EQ(plain->step().loss, first->step().loss);
}

TEST(RoundedGradients, RefuseWhatTheyCannotDo) {
  const TemporaryFolder folder;
  const Settings settings = rounded(testing::tiny_settings(folder));
  EXPECT_NO_THROW(validate(settings));
  Settings muon = settings;
  muon.optimizer_kind = OptimizerKind::kMuon;
  EXPECT_THAT([&] { validate(muon); }, ThrowsMessage<UserError>(HasSubstr("is for AdamW")));
  Settings released = settings;
  released.train.max_grad_norm = 0;
  released.shard.release_gradients = true;
  EXPECT_THAT([&] { validate(released); },
              ThrowsMessage<UserError>(HasSubstr("optim.release_gradients")));
  Settings full = settings;
  full.shard.scope = ShardScope::kFull;
  EXPECT_NO_THROW(check_sharding(full, Layout({}, 1)));
  EXPECT_THAT([&] { check_sharding(full, Layout({}, 2)); },
              ThrowsMessage<UserError>(HasSubstr("does not go with optim.shard")));
  Settings near = settings;
  near.shard.reduce_group = 2;
  EXPECT_THAT([&] { check_sharding(near, Layout({}, 4)); },
              ThrowsMessage<UserError>(HasSubstr("does not go with optim.reduce_group 2")));
}

}  // namespace
}  // namespace tessera
