#include "train/state/load_optimizer.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <set>

#include "ops/adamw/state_rounding.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using testing::make_trainer;
using testing::TemporaryFolder;
using testing::tiny_settings;

Settings settings_with(const TemporaryFolder& folder, const StateFormats& formats) {
  Settings settings = tiny_settings(folder);
  settings.train.precision = Precision::kBF16;
  settings.optimizer.formats = formats;
  return settings;
}

std::map<std::string, std::vector<float>> read_floats(const std::vector<NamedSlice>& slices) {
  std::map<std::string, std::vector<float>> values;
  for (const NamedSlice& slice : slices) {
    auto& to = values[slice.name];
    if (slice.tensor.dtype == DType::kF32)
      to.assign(slice.tensor.span<float>().begin(), slice.tensor.span<float>().end());
    if (slice.tensor.dtype == DType::kBF16)
      to.assign(slice.tensor.span<Bf16>().begin(), slice.tensor.span<Bf16>().end());
  }
  return values;
}

/// What weights are with all digits that the optimizer keeps, as a master of this kind has them.
std::map<std::string, std::vector<float>> read_masters(Trainer& trainer, MasterKind as) {
  auto values = read_floats(trainer.state().optimizer().weight_slices(HeldPart::kHeld));
  trainer.state().optimizer().change_masters([&](const NamedSlice& master) {
    const auto digits = master.tensor.span<float>();
    values[master.name].assign(digits.begin(), digits.end());
  });
  for (auto& [name, digits] : values) {
    for (float& x : digits) {
      const auto word = std::bit_cast<uint32_t>(x);
      if (as == MasterKind::kRemainder) x = std::bit_cast<float>(leave_halfway(word));
      if (as == MasterKind::kRemainder8) x = std::bit_cast<float>(nearest_24_bits(word));
    }
  }
  return values;
}

/// Masters go from any format to any other: all digits that both have arrive.
TEST(LoadOptimizer, TakesMastersOfAnyFormat) {
  constexpr MasterKind kKinds[] = {MasterKind::kF32, MasterKind::kRemainder,
                                   MasterKind::kRemainder8, MasterKind::kNone};
  for (const MasterKind from : kKinds) {
    const TemporaryFolder folder;
    const auto saved = make_trainer(settings_with(folder, {.master = from}));
    for (int i = 0; i < 3; ++i) saved->step();
    saved->save("");
    const auto weights = read_floats(saved->state().optimizer().weight_slices(HeldPart::kHeld));
    for (const MasterKind to : kKinds) {
      SCOPED_TRACE(fmt::format("from {} to {}", master_suffix(from), master_suffix(to)));
      const auto loaded = make_trainer(settings_with(folder, {.master = to}));
      ASSERT_EQ(loaded->position().step, 3);
      EXPECT_EQ(read_floats(loaded->state().optimizer().weight_slices(HeldPart::kHeld)), weights);
      const auto expected = to == MasterKind::kNone ? weights : read_masters(*saved, to);
      EXPECT_EQ(read_masters(*loaded, to), expected);
      EXPECT_TRUE(std::isfinite(loaded->step().loss));
    }
  }
}

TEST(LoadOptimizer, RoundsAndWidensMoments) {
  const StateFormats narrow = {.first_moment = MomentKind::kBF16,
                               .second_moment = MomentKind::kBF16};
  const TemporaryFolder folder;
  const auto wide = make_trainer(settings_with(folder, {}));
  for (int i = 0; i < 3; ++i) wide->step();
  wide->save("");
  const auto rounded = make_trainer(settings_with(folder, narrow));
  auto expected = read_floats(wide->state().optimizer().state_slices(HeldPart::kHeld));
  for (auto& [name, values] : expected) {
    if (name.ends_with(".master")) continue;
    for (float& x : values) x = Bf16(x);
  }
  EXPECT_EQ(read_floats(rounded->state().optimizer().state_slices(HeldPart::kHeld)), expected);
  rounded->save("");
  const auto widened = make_trainer(settings_with(folder, {}));
  EXPECT_EQ(read_floats(widened->state().optimizer().state_slices(HeldPart::kHeld)), expected);
}

TEST(LoadOptimizer, FewerBitsTakeLessMemory) {
  const TemporaryFolder folder;
  const auto bytes = [&](const StateFormats& formats) {
    return make_trainer(settings_with(folder, formats))->state().bytes().optimizer;
  };
  const auto all = static_cast<double>(bytes({}));
  // 12 bytes an element, of which norms and the router have 8 in any case.
  EXPECT_NEAR(bytes({.master = MasterKind::kRemainder}) / all, 10.0 / 12, 0.02);
  EXPECT_NEAR(bytes({.master = MasterKind::kRemainder8}) / all, 9.0 / 12, 0.02);
  EXPECT_NEAR(bytes({MomentKind::kBF16, MomentKind::kBF16, MasterKind::kF32}) / all, 8.0 / 12,
              0.02);
  EXPECT_NEAR(bytes({MomentKind::kBF16, MomentKind::kBF16, MasterKind::kNone}) / all, 4.0 / 12,
              0.02);
}

/// The same with Muon.
Settings muon_settings(const TemporaryFolder& folder, const StateFormats& formats = {}) {
  Settings settings = settings_with(folder, formats);
  settings.optimizer_kind = OptimizerKind::kMuon;
  return settings;
}

TEST(LoadOptimizer, MuonContinuesBitwise) {
  for (const StateFormats& formats :
       {StateFormats{}, StateFormats{MomentKind::kBF16, MomentKind::kBF16, MasterKind::kRemainder},
        StateFormats{MomentKind::kBF16, MomentKind::kF32, MasterKind::kRemainder8},
        StateFormats{MomentKind::kBF16, MomentKind::kBF16, MasterKind::kNone}}) {
    const TemporaryFolder folder;
    const auto unbroken = make_trainer(muon_settings(folder, formats));
    for (int i = 0; i < 2; ++i) unbroken->step();
    unbroken->save("");
    const auto resumed = make_trainer(muon_settings(folder, formats));
    ASSERT_EQ(resumed->position().step, 2);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(resumed->step().loss, unbroken->step().loss);
    const auto state = [](Trainer& trainer) {
      return read_floats(trainer.state().optimizer().state_slices(HeldPart::kHeld));
    };
    EXPECT_EQ(state(*resumed), state(*unbroken));
  }
}

TEST(LoadOptimizer, MuonKeepsNoSecondMomentsOfMatrices) {
  const TemporaryFolder folder;
  const auto trainer = make_trainer(muon_settings(folder));
  std::set<std::string> names;
  for (const NamedSlice& slice : trainer->state().optimizer().state_slices(HeldPart::kHeld))
    names.insert(slice.name);
  for (const char* name : {"layers.0.attn.q.weight", "layers.0.moe.experts.gate_up.weight",
                           "layers.0.moe.router.weight"}) {
    EXPECT_TRUE(names.contains(std::string(name) + ".m")) << name;
    EXPECT_FALSE(names.contains(std::string(name) + ".v")) << name;
  }
  for (const char* name : {"embedding.weight", "layers.0.attn_norm.weight"})
    EXPECT_TRUE(names.contains(std::string(name) + ".v")) << name;
}

TEST(LoadOptimizer, MuonTakesAdamWsFirstMoments) {
  const TemporaryFolder folder;
  const auto adamw = make_trainer(settings_with(folder, {}));
  for (int i = 0; i < 3; ++i) adamw->step();
  adamw->save("");
  const auto muon = make_trainer(muon_settings(folder));
  ASSERT_EQ(muon->position().step, 3);
  const auto expected = read_floats(adamw->state().optimizer().state_slices(HeldPart::kHeld));
  for (const auto& [name, values] :
       read_floats(muon->state().optimizer().state_slices(HeldPart::kHeld)))
    EXPECT_EQ(values, expected.at(name)) << name;
  EXPECT_TRUE(std::isfinite(muon->step().loss));
}

TEST(LoadOptimizer, MuonTakesAdamWsFirstMomentsWithScales) {
  const TemporaryFolder folder;
  const StateFormats narrow = {MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8};
  const auto adamw = make_trainer(settings_with(folder, narrow));
  for (int i = 0; i < 3; ++i) adamw->step();
  adamw->save("");
  // FP8 in F32, and from there in BF16, is all there.
  const auto wide = make_trainer(settings_with(folder, {.master = MasterKind::kRemainder8}));
  const auto expected = read_floats(wide->state().optimizer().state_slices(HeldPart::kHeld));
  const auto muon = make_trainer(
      muon_settings(folder, {MomentKind::kBF16, MomentKind::kF32, MasterKind::kRemainder8}));
  ASSERT_EQ(muon->position().step, 3);
  const auto found = read_floats(muon->state().optimizer().state_slices(HeldPart::kHeld));
  const std::string name = "layers.0.moe.experts.gate_up.weight.m";
  EXPECT_EQ(found.at(name), expected.at(name));
  EXPECT_TRUE(std::isfinite(muon->step().loss));
}

TEST(LoadOptimizer, AdamWRefusesMuonsState) {
  const TemporaryFolder folder;
  const auto muon = make_trainer(muon_settings(folder));
  muon->step();
  muon->save("");
  try {
    make_trainer(settings_with(folder, {}));
    FAIL();
  } catch (const UserError& error) {
    for (const char* part : {"step-00000001", "second moments", "optim.name", "run.init_from"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(MuonSettings, AreRefusedWithAdamW) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  settings.optimizer.muon.ns_steps = 4;
  EXPECT_THROW(validate(settings), UserError);
  settings.optimizer.muon = {.momentum = 0.9};
  EXPECT_THROW(validate(settings), UserError);
  settings.optimizer_kind = OptimizerKind::kMuon;
  validate(settings);
}

TEST(StateFormats, RefusesMastersOfF32Weights) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  for (const MasterKind kind :
       {MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone}) {
    settings.optimizer.formats.master = kind;
    EXPECT_THROW(validate(settings), UserError);
  }
  settings.train.precision = Precision::kBF16;
  validate(settings);
}

}  // namespace
}  // namespace tessera
