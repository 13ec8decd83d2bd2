#include "train/state/load_moments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "ops/adamw/moment_blocks.h"
#include "train/testing/layout_runs.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using testing::make_trainer;
using testing::TemporaryFolder;
using testing::tiny_settings;

constexpr MomentKind kKinds[] = {MomentKind::kF32, MomentKind::kBF16, MomentKind::kF16,
                                 MomentKind::kFp8};

using Tensors = std::map<std::string, OwnedTensor>;

/// A model whose matrices have several blocks in a row, cut by tensor parallelism at their borders.
Settings settings_with_blocks(const TemporaryFolder& folder, const StateFormats& formats) {
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.model.hidden_size = 320;
  settings.model.head_size = 64;
  settings.model.inner_size = settings.model.moe.shared_inner_size = 256;
  settings.train.precision = Precision::kBF16;
  settings.optimizer.formats = formats;
  settings.run.folder = folder.file("run");
  return settings;
}

/// Continues the run to step 2 on a layout, and gives the optimizer's state, whole.
Tensors run_to_step_2(Settings settings, const testing::NamedLayout& layout, bool save) {
  settings.parallel = layout.parallel;
  settings.shard = layout.shard;
  Tensors whole;
  std::mutex mutex;
  run_thread_world(layout.num_ranks, [&](World& world) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    Trainer trainer(own, std::move(data), world, choose_host);
    trainer.resume("");
    while (trainer.position().step < 2) trainer.step();
    if (save) trainer.save("");
    trainer.state().wait_weights();
    const std::scoped_lock lock(mutex);
    for (const NamedSlice& slice : trainer.state().owned_optimizer()) {
      const auto [at, added] =
          whole.try_emplace(slice.name, slice.tensor.dtype, slice.slice.global);
      copy_slice_into(slice.slice, slice.tensor, at->second);
    }
  });
  return whole;
}

/// The moments of a state, as F32.
std::map<std::string, std::vector<float>> read_moments(const Tensors& state) {
  std::map<std::string, std::vector<float>> moments;
  for (const auto& [name, tensor] : state) {
    const bool first = name.ends_with(".m");
    if (!first && !name.ends_with(".v")) continue;
    const Tensor kept = tensor;
    std::vector<float>& to = moments[name];
    to.resize(static_cast<size_t>(kept.num_elements()));
    if (kept.dtype == DType::kF32) {
      std::ranges::copy(kept.span<float>(), to.begin());
    } else if (kept.dtype == DType::kBF16) {
      std::ranges::copy(kept.span<Bf16>(), to.begin());
    } else {
      const MomentKind kind = kept.dtype == DType::kF16 ? MomentKind::kF16 : MomentKind::kFp8;
      decode_moments(
          {first ? Moment::kFirst : Moment::kSecond, kind, kept, state.at(name + "_scale"), 0},
          view(std::span(to), kept.shape));
    }
  }
  return moments;
}

testing::NamedLayout layout_named(const std::string& name) {
  const auto layouts = testing::layouts_for_checkpoints();
  return *std::ranges::find(layouts, name, &testing::NamedLayout::name);
}

/// What one layout saved another has, to the bit.
TEST(LoadMoments, RectanglesOfAnyLayout) {
  for (const StateFormats& formats :
       {StateFormats{MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8},
        StateFormats{MomentKind::kBF16, MomentKind::kF16, MasterKind::kF32}}) {
    for (const char* saved_on : {"dp3", "full"}) {
      const TemporaryFolder folder;
      const Settings settings = settings_with_blocks(folder, formats);
      const Tensors saved = run_to_step_2(settings, layout_named(saved_on), true);
      int num_scales = 0;
      const std::vector<const char*> others = {"one", "tp2", "pp2dp3", "ep2", "hybrid", "full"};
      for (const char* loaded_on : testing::share_of_cases(others, 1)) {
        SCOPED_TRACE(fmt::format("from {} to {}", saved_on, loaded_on));
        const Tensors loaded = run_to_step_2(settings, layout_named(loaded_on), false);
        ASSERT_EQ(loaded.size(), saved.size());
        for (const auto& [name, tensor] : saved) {
          const Tensor& other = loaded.at(name);
          ASSERT_EQ(other.shape, tensor.get().shape) << name;
          const auto bytes = static_cast<size_t>(other.num_bytes());
          EXPECT_EQ(std::memcmp(other.data, tensor.get().data, bytes), 0) << name;
          num_scales += names_scales(name) ? 1 : 0;
        }
      }
      EXPECT_GT(num_scales, 20);
    }
  }
}

/// What a format can tell arrives: as it is in wider ones, within half a step in narrower ones.
TEST(LoadMoments, FromAnyFormatToAnyOther) {
  const auto layout = layout_named("full");
  const std::vector<MomentKind> kinds(std::begin(kKinds), std::end(kKinds));
  for (const MomentKind from : testing::share_of_cases(kinds, 0)) {
    const TemporaryFolder folder;
    const StateFormats formats = {from, from, MasterKind::kRemainder8};
    const Tensors state = run_to_step_2(settings_with_blocks(folder, formats), layout, true);
    const auto saved = read_moments(state);
    for (const MomentKind to : testing::share_of_cases(kinds, 2)) {
      SCOPED_TRACE(fmt::format("from {} to {}", moment_name(from), moment_name(to)));
      const StateFormats own = {to, to, MasterKind::kRemainder8};
      const auto loaded =
          read_moments(run_to_step_2(settings_with_blocks(folder, own), layout, false));
      // Digits, and what the smallest of a block are rounded by beside its largest, about 1.
      const double step = to == MomentKind::kFp8    ? 1.0 / 16
                          : to == MomentKind::kF16  ? 1.0 / 2048
                          : to == MomentKind::kBF16 ? 1.0 / 256
                                                    : 0;
      ASSERT_EQ(loaded.size(), saved.size());
      for (const auto& [name, values] : saved) {
        const std::vector<float>& found = loaded.at(name);
        // Vectors are F32 beside FP8.
        const bool exact = to == from || to == MomentKind::kF32 ||
                           state.at(name).get().dtype == moment_dtype(MomentKind::kFp8);
        double largest = 0;
        for (const float x : values) largest = std::max<double>(largest, std::abs(x));
        EXPECT_GT(largest, 0) << name;
        for (size_t i = 0; i < values.size(); ++i) {
          const double value = values[i];
          if (exact) {
            ASSERT_EQ(found[i], values[i]) << name;
          } else {
            ASSERT_NEAR(found[i], value, step * (std::abs(value) + 1e-4 * largest)) << name;
          }
        }
      }
    }
  }
}

TEST(LoadMoments, StateTakesTheBytesThatWerePromised) {
  const TemporaryFolder folder;
  Settings settings = settings_with_blocks(folder, {});
  settings.model.hidden_size = 512;
  settings.model.vocab_size = 300;
  settings.model.moe.inner_size = 256;
  const auto bytes = [&](const StateFormats& formats) {
    settings.optimizer.formats = formats;
    const auto layout = make_run_layout(settings, *make_single_world());
    return static_cast<double>(
        ModelState::count_bytes(settings, layout, optimizer_on_host()).optimizer);
  };
  const double element = bytes({}) / 12;
  constexpr MomentKind kFp8 = MomentKind::kFp8;
  constexpr MomentKind kF16 = MomentKind::kF16;
  EXPECT_NEAR(bytes({kFp8, kFp8, MasterKind::kF32}) / element / 6, 1, 0.02);
  EXPECT_NEAR(bytes({kFp8, kFp8, MasterKind::kRemainder8}) / element / 3, 1, 0.02);
  EXPECT_NEAR(bytes({kF16, kF16, MasterKind::kRemainder}) / element / 6, 1, 0.02);
  EXPECT_NEAR(bytes({kFp8, kF16, MasterKind::kNone}) / element / 3, 1, 0.02);
}

TEST(LoadMoments, LayoutsThatCutBlocksAreRefused) {
  const TemporaryFolder folder;
  Settings settings = settings_with_blocks(folder, {MomentKind::kFp8, MomentKind::kF32});
  settings.model.head_size = 24;  // 96 columns of the output projection, 48 for each rank
  EXPECT_THAT([&] { run_to_step_2(settings, layout_named("tp2"), false); },
              ::testing::ThrowsMessage<UserError>(
                  ::testing::AllOf(::testing::HasSubstr("optim.first_moment = \"fp8\""),
                                   ::testing::HasSubstr("of the 96 of layers.0.attn.o.weight"),
                                   ::testing::HasSubstr("parallel.tp"))));
  settings.optimizer.formats = {};
  EXPECT_NO_THROW(run_to_step_2(settings, layout_named("tp2"), false));
}

TEST(LoadMoments, MuonsAveragesMayHaveScales) {
  const TemporaryFolder folder;
  Settings settings = tiny_settings(folder);
  settings.optimizer_kind = OptimizerKind::kMuon;
  for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
    settings.optimizer.formats.first_moment = kind;
    settings.optimizer.formats.second_moment = kind;
    validate(settings);
    const auto trainer = make_trainer(settings);
    EXPECT_TRUE(std::isfinite(trainer->step().loss));
    int64_t num_scales = 0;
    for (const NamedSlice& state : trainer->state().optimizer().state_slices(HeldPart::kHeld))
      num_scales += state.name.ends_with(".attn.q.weight.m_scale") ? 1 : 0;
    EXPECT_EQ(num_scales, settings.model.num_layers);
  }
}

}  // namespace
}  // namespace tessera
