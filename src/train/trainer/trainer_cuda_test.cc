// Whole training runs on a GPU, beside the same ones on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <numeric>

#include "checkpoint/checkpoint.h"
#include "ops/testing/gpu_test.h"
#include "train/bench/bench_layer.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/infer/logits.h"
#include "train/infer/multiple_choice.h"
#include "train/testing/option_families.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

Settings on(DeviceChoice device, Settings settings) {
  settings.run.device = device;
  return settings;
}

std::vector<double> run_steps(Trainer& trainer, int count) {
  std::vector<double> losses;
  for (int i = 0; i < count; ++i) losses.push_back(trainer.step().loss);
  return losses;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], tolerance * expected[i]) << "step " << i + 1;
}

double mean_of_last(const std::vector<double>& values, size_t count) {
  double sum = 0;
  for (size_t i = values.size() - count; i < values.size(); ++i) sum += values[i];
  return sum / static_cast<double>(count);
}

Generated write(LoadedModel& model) {
  Generator generator(model.settings().model, model.settings().train.dtype(), model.backend(),
                      model.parameters(), model.experts());
  return generator.generate_text(model.tokenizer(), "the cat sat",
                                 {.max_tokens = 20, .temperature = 0});
}

/// The prompt's and the generated tokens with their log-probabilities. In BF16 a token may be
/// another where two are almost equal, and so all that follow.
void expect_same_text(LoadedModel& cpu, LoadedModel& gpu, Precision precision) {
  const bool exact = precision == Precision::kF32;
  const Generated expected = write(cpu);
  const Generated found = write(gpu);
  ASSERT_EQ(found.prompt.size(), expected.prompt.size());
  const auto expect_token = [&](const GeneratedToken& a, const GeneratedToken& b) {
    EXPECT_EQ(a.id, b.id);
    EXPECT_NEAR(a.log_probability, b.log_probability, exact ? 1e-4 : 0.3);
  };
  for (size_t i = 0; i < expected.prompt.size(); ++i)
    expect_token(found.prompt[i], expected.prompt[i]);
  if (!exact) return;
  ASSERT_EQ(found.tokens.size(), expected.tokens.size());
  for (size_t i = 0; i < expected.tokens.size(); ++i)
    expect_token(found.tokens[i], expected.tokens[i]);
}

struct RunCase {
  std::string name;
  double tolerance;  ///< of losses between the devices, relative, in the first steps
  void (*change)(Settings&);
};
void PrintTo(const RunCase& run, std::ostream* out) {
  *out << run.name;
}

class GpuRun : public GpuTest, public ::testing::WithParamInterface<RunCase> {
 protected:
  Settings settings(DeviceChoice device) const {
    Settings settings = on(device, tiny_settings(folder_));
    GetParam().change(settings);
    return settings;
  }
  const TemporaryFolder folder_;
};

TEST_P(GpuRun, TwiceGivesTheSameBits) {
  const auto a = make_trainer(settings(DeviceChoice::kCuda));
  const auto b = make_trainer(settings(DeviceChoice::kCuda));
  ASSERT_FALSE(a->backend().is_host());
  EXPECT_EQ(run_steps(*a, 4), run_steps(*b, 4));
  expect_same_state(*a, *b);
}

TEST_P(GpuRun, ContinuesBitwise) {
  const auto whole = make_trainer(settings(DeviceChoice::kCuda));
  const auto losses = run_steps(*whole, 4);

  const auto first = make_trainer(settings(DeviceChoice::kCuda));
  run_steps(*first, 2);
  first->save("");
  const auto second = make_trainer(settings(DeviceChoice::kCuda));
  ASSERT_EQ(second->position().step, 2);
  EXPECT_EQ(run_steps(*second, 2), std::vector(losses.begin() + 2, losses.end()));
  expect_same_state(*whole, *second);
}

/// A checkpoint of either continues on the other.
TEST_P(GpuRun, GoesOnWhereTheOtherDeviceStopped) {
  const auto expected = run_steps(*make_trainer(settings(DeviceChoice::kCpu)), 4);
  for (const auto& [from, to, folder] :
       {std::tuple(DeviceChoice::kCuda, DeviceChoice::kCpu, "from-gpu"),
        std::tuple(DeviceChoice::kCpu, DeviceChoice::kCuda, "from-cpu")}) {
    Settings own = settings(from);
    own.run.folder = folder_.file(folder);
    const auto first = make_trainer(own);
    auto losses = run_steps(*first, 2);
    first->save("");
    const auto second = make_trainer(on(to, own));
    ASSERT_EQ(second->position().step, 2);
    for (const double loss : run_steps(*second, 2)) losses.push_back(loss);
    expect_near(losses, expected, GetParam().tolerance);
  }
}

TEST_P(GpuRun, ValidatesAndCountsAsTheCpuDoes) {
  const auto cpu = make_trainer(settings(DeviceChoice::kCpu));
  const auto gpu = make_trainer(settings(DeviceChoice::kCuda));
  EXPECT_NEAR(gpu->validate(), cpu->validate(), GetParam().tolerance * cpu->validate());
  const StepOutcome expected = cpu->step();
  const StepOutcome found = gpu->step();
  EXPECT_NEAR(found.update.grad_norm, expected.update.grad_norm,
              20 * GetParam().tolerance * expected.update.grad_norm);
  EXPECT_NEAR(found.balance_loss, expected.balance_loss, 0.05 * expected.balance_loss);
  for (const std::vector<int64_t>& layer : gpu->expert_loads())
    EXPECT_EQ(std::accumulate(layer.begin(), layer.end(), int64_t{0}), 4 * 16 * 2);
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuRun,
    ::testing::Values(
        RunCase{"f32", 5e-4, [](Settings&) {}},
        RunCase{"bf16", 2e-2, [](Settings& s) { s.train.precision = Precision::kBF16; }},
        RunCase{"recompute", 5e-4, [](Settings& s) { s.train.recompute = {"all"}; }},
        RunCase{"global_balance", 5e-4,
                [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
        RunCase{"predicted_tokens", 5e-4, [](Settings& s) { s.model.mtp_layers = 1; }}),
    [](const auto& info) { return info.param.name; });

using GpuGraphs = GpuRun;

/// Every program can be recorded, and replays give the bits of plain launches, while tokens,
/// routing and with it ragged sizes change from step to step, and with validation in between.
TEST_P(GpuGraphs, GiveTheBitsOfPlainLaunches) {
  Settings recorded = settings(DeviceChoice::kCuda);
  Settings plain = recorded;
  recorded.run.cuda_graphs = GraphMode::kOn;
  plain.run.cuda_graphs = GraphMode::kOff;
  const auto a = make_trainer(recorded);
  const auto b = make_trainer(plain);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run_steps(*a, 2), run_steps(*b, 2)) << "steps from " << 2 * i + 1;
    EXPECT_EQ(a->expert_loads(), b->expert_loads());
    EXPECT_EQ(a->validate(), b->validate());
  }
  expect_same_state(*a, *b);
  EXPECT_GT(a->backend().control().num_operations, 0);
  EXPECT_EQ(b->backend().control().num_operations, 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuGraphs,
    ::testing::Values(
        RunCase{"f32", 5e-4, [](Settings&) {}},
        RunCase{"bf16", 2e-2, [](Settings& s) { s.train.precision = Precision::kBF16; }},
        RunCase{"recompute", 5e-4, [](Settings& s) { s.train.recompute = {"all"}; }},
        RunCase{"global_balance", 5e-4,
                [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
        RunCase{"predicted_tokens", 5e-4, [](Settings& s) { s.model.mtp_layers = 1; }},
        RunCase{"one_micro_batch", 5e-4, [](Settings& s) { s.train.micro_batch = 4; }},
        RunCase{"three_micro_batches", 5e-4,
                [](Settings& s) {
                  s.train.micro_batch = 1;
                  s.train.global_batch = 3;
                }},
        RunCase{"whole_model_balance", 5e-4,
                [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kModel; }},
        RunCase{"block_sparse", 5e-4,
                [](Settings& s) {
                  s.model.moe.experts = ExpertPath::kBlockSparse;
                  s.model.moe.block_size = 16;
                }},
        RunCase{"capacity", 5e-4, [](Settings& s) { s.model.moe.capacity_factor = 1.0; }}),
    [](const auto& info) { return info.param.name; });

class GpuRuns : public GpuTest {
 protected:
  const TemporaryFolder folder_;
};

/// What a run did of three steps, from the first weights on.
struct ThreeSteps {
  std::vector<double> losses;
  double grad_norm = 0;
};

/// Each family of options on both devices.
class GpuOptions : public GpuTest, public ::testing::WithParamInterface<OptionFamily> {
 protected:
  /// On text, with a tokenizer, so that there is something to evaluate and to write.
  Settings on_text(DeviceChoice device, Precision precision) const {
    Settings settings = on(device, settings_of(GetParam()));
    const Settings text = tiny_settings(folder_);
    settings.data.text = text.data.text;
    settings.data.tokenizer = "byte";
    settings.data.validation_fraction = 0.05;
    settings.model.vocab_size = std::max<int64_t>(settings.model.vocab_size, 320);
    settings.train.precision = precision;
    settings.train.steps = settings.schedule.num_steps = 3;
    settings.run.folder = folder_.file(device == DeviceChoice::kCuda ? "gpu" : "cpu");
    return settings;
  }
  static ThreeSteps run(const Settings& settings) {
    const auto trainer = make_trainer(settings);
    ThreeSteps result;
    result.grad_norm = trainer->step().update.grad_norm;
    result.losses = run_steps(*trainer, 2);
    return result;
  }
  const TemporaryFolder folder_;
};

/// Losses, balance losses, counts and norms of three steps, the first step's gradients and the last
/// weights, in F32.
TEST_P(GpuOptions, GiveTheHostsGradientsAndWeights) {
  const Settings settings = on(DeviceChoice::kCuda, settings_of(GetParam()));
  if (settings.shard.release_gradients) GTEST_SKIP() << "no gradients to compare";
  const Verification result = verify_layout({.settings = settings});
  EXPECT_TRUE(result.agrees()) << describe(result, false);
  std::cout << fmt::format("  {}: gradients {:.1e}, weights {:.1e}, scalars {:.1e}\n",
                           GetParam().name, result.worst_gradient(), result.worst_weight(),
                           result.worst_scalar());
}

TEST_P(GpuOptions, LearnInBf16AsTheHost) {
  constexpr double kTolerance = 2e-2;
  const ThreeSteps cpu = run(on_text(DeviceChoice::kCpu, Precision::kBF16));
  const ThreeSteps gpu = run(on_text(DeviceChoice::kCuda, Precision::kBF16));
  expect_near(gpu.losses, cpu.losses, kTolerance);
  EXPECT_NEAR(gpu.grad_norm, cpu.grad_norm, 0.1 * cpu.grad_norm);
}

/// One checkpoint, on both devices.
TEST_P(GpuOptions, EvaluateAndWriteAsTheHost) {
  for (const auto& [precision, tolerance] :
       {std::pair(Precision::kF32, 1e-5), std::pair(Precision::kBF16, 1e-2)}) {
    SCOPED_TRACE(precision == Precision::kF32 ? "f32" : "bf16");
    Settings settings = on_text(DeviceChoice::kCpu, precision);
    settings.run.folder += precision == Precision::kF32 ? "-f32" : "-bf16";
    const auto trainer = make_trainer(settings);
    trainer->step();
    trainer->save(make_schema(settings).to_toml());
    LoadedModel cpu_model(settings.run.folder, DeviceChoice::kCpu);
    LoadedModel gpu_model(settings.run.folder, DeviceChoice::kCuda);
    ASSERT_FALSE(gpu_model.backend().is_host());
    const EvaluationRequest request{.max_batches = 2};
    const Evaluation expected = evaluate(cpu_model, request);
    const Evaluation found = evaluate(gpu_model, request);
    EXPECT_EQ(found.num_tokens, expected.num_tokens);
    EXPECT_NEAR(found.loss, expected.loss, tolerance * expected.loss);
    if (!settings.model.moe.experts_choose()) expect_same_text(cpu_model, gpu_model, precision);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuOptions, ::testing::ValuesIn(option_families()),
                         [](const auto& info) { return std::string(info.param.name); });

/// Roundings grow with the steps until the runs are different ones that learn the same.
TEST_F(GpuRuns, TwoHundredStepsLearnWhatTheCpuLearns) {
  constexpr int kSteps = 200;
  Settings settings = tiny_settings(folder_);
  settings.train.steps = settings.schedule.num_steps = kSteps;
  settings.schedule.peak_lr = 3e-3;
  const auto cpu = run_steps(*make_trainer(on(DeviceChoice::kCpu, settings)), kSteps);
  const auto gpu = run_steps(*make_trainer(on(DeviceChoice::kCuda, settings)), kSteps);
  expect_near({gpu.begin(), gpu.begin() + 4}, {cpu.begin(), cpu.begin() + 4}, 5e-4);
  EXPECT_LT(mean_of_last(gpu, 20), 0.7 * gpu.front());
  EXPECT_NEAR(mean_of_last(gpu, 20), mean_of_last(cpu, 20), 0.03 * mean_of_last(cpu, 20));
  for (size_t step = 0; step < kSteps; step += 20)
    std::cout << fmt::format("  step {:>3}: cpu {:.5f}, gpu {:.5f}\n", step + 1, cpu[step],
                             gpu[step]);
}

/// One expert is never chosen: its products have no rows.
TEST_F(GpuRuns, TrainWithADeadExpert) {
  for (const auto& [precision, tolerance] :
       {std::pair(Precision::kF32, 5e-4), std::pair(Precision::kBF16, 2e-2)}) {
    Settings settings = tiny_settings(folder_);
    settings.train.precision = precision;
    settings.model.moe.expert_bias = true;
    std::vector<std::vector<double>> losses;
    for (const DeviceChoice device : {DeviceChoice::kCpu, DeviceChoice::kCuda}) {
      const auto trainer = make_trainer(on(device, settings));
      for (ExpertState& expert : trainer->state().experts())
        expert.bias.get().span<float>()[1] = -1e9F;
      losses.push_back(run_steps(*trainer, 3));
      for (const std::vector<int64_t>& layer : trainer->expert_loads()) {
        EXPECT_EQ(layer[1], 0);
        EXPECT_GT(layer[0] + layer[2] + layer[3], 0);
      }
    }
    expect_near(losses[1], losses[0], tolerance);
  }
}

/// With no memory left, what needs some to be recorded runs as it always did.
TEST_F(GpuRuns, GraphsWithoutMemoryLeaveTheBitsAsTheyAre) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  const auto starved = make_trainer(settings);
  settings.run.cuda_graphs = GraphMode::kOff;
  const auto plain = make_trainer(settings);
  EXPECT_EQ(run_steps(*starved, 1), run_steps(*plain, 1));
  Device& device = starved->backend().device();
  std::vector<std::pair<std::byte*, int64_t>> taken;
  for (int64_t size = int64_t{32} << 30; size >= int64_t{2} << 20;) {
    std::byte* const data = device.allocate(size);
    if (data != nullptr) {
      taken.emplace_back(data, size);
    } else {
      size /= 2;
    }
  }
  EXPECT_EQ(run_steps(*starved, 3), run_steps(*plain, 3));
  for (const auto& [data, size] : taken) device.release(data, size);
  EXPECT_EQ(run_steps(*starved, 3), run_steps(*plain, 3));
  expect_same_state(*starved, *plain);
}

/// Runs of two shapes take turns on one GPU.
TEST_F(GpuRuns, GraphsOfTwoShapesStayApart) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  std::vector<std::unique_ptr<Trainer>> recorded, plain;
  for (const int64_t length : {16, 23}) {
    settings.data.sequence_length = length;
    settings.run.folder = folder_.file(fmt::format("run-{}", length));
    settings.run.cuda_graphs = GraphMode::kOn;
    recorded.push_back(make_trainer(settings));
    settings.run.cuda_graphs = GraphMode::kOff;
    plain.push_back(make_trainer(settings));
  }
  for (int i = 0; i < 4; ++i) {
    for (size_t run = 0; run < 2; ++run)
      EXPECT_EQ(recorded[run]->step().loss, plain[run]->step().loss);
  }
  for (size_t run = 0; run < 2; ++run) expect_same_state(*recorded[run], *plain[run]);
}

/// For the losses and the gradients' norm together.
TEST_F(GpuRuns, WaitOnceAStep) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  settings.train.micro_batch = 1;
  const auto trainer = make_trainer(settings);
  run_steps(*trainer, 2);
  const int64_t before = trainer->backend().device().num_waits();
  run_steps(*trainer, 3);
  EXPECT_EQ(trainer->backend().device().num_waits() - before, 3);
  EXPECT_EQ(trainer->num_read_ahead(), 3);
}

/// What cannot fit is refused before anything of it is taken, and the GPU stays usable.
TEST_F(GpuRuns, AModelBeyondTheMemoryIsRefused) {
  Settings huge = on(DeviceChoice::kCuda, tiny_settings(folder_));
  huge.model.hidden_size = 131072;
  huge.model.num_heads = 1024;
  const auto expect_refused = [](const auto& call) {
    try {
      call();
      FAIL() << "hundreds of GiB were taken to fit";
    } catch (const UserError& error) {
      for (const char* part : {"out of memory", "cuda", "the least", "weights", "optimizer",
                               "activations", "train.micro_batch"})
        EXPECT_THAT(error.what(), HasSubstr(part));
      std::cout << "  " << error.what() << "\n";
    }
  };
  expect_refused([&] { check_model(huge, 1); });
  expect_refused([&] { make_trainer(huge); });
  EXPECT_GT(make_trainer(on(DeviceChoice::kCuda, tiny_settings(folder_)))->step().loss, 0);
}

/// Memory that cannot be had after all is named, with what was predicted.
TEST_F(GpuRuns, MemoryThatIsTakenByOthersIsTold) {
  const Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  const auto trainer = make_trainer(settings);
  Device& device = trainer->backend().device();
  try {
    with_prediction(trainer->prediction(),
                    [&] { const Buffer huge(int64_t{1} << 42, "a test", device); });
    FAIL() << "4 TiB were had";
  } catch (const OutOfMemory& error) {
    for (const char* part : {"out of memory: 4 TiB for a test", "on cuda:0", "are free",
                             "were predicted at the peak", "weights", "activations"})
      EXPECT_THAT(error.what(), HasSubstr(part));
    std::cout << "  " << error.what() << "\n";
  }
  EXPECT_GT(trainer->step().loss, 0);
}

/// Sequences of logits, and multiple choice.
TEST_F(GpuRuns, ScoreAsTheHost) {
  Settings settings = tiny_settings(folder_);
  const auto trainer = make_trainer(settings);
  run_steps(*trainer, 2);
  trainer->save(make_schema(settings).to_toml());
  LoadedModel cpu(settings.run.folder, DeviceChoice::kCpu);
  LoadedModel gpu(settings.run.folder, DeviceChoice::kCuda);
  const auto questions = parse_choice_questions(
      R"({"context": "the cat sat on", "choices": [" a mat", " the", " it and"], "answer": 0})",
      "a test");
  const ChoiceScores expected = evaluate_choices(cpu, questions).questions[0];
  const ChoiceScores found = evaluate_choices(gpu, questions).questions[0];
  for (size_t i = 0; i < expected.log_likelihoods.size(); ++i)
    EXPECT_NEAR(found.log_likelihoods[i], expected.log_likelihoods[i], 1e-4) << i;

  std::vector<int64_t> ids(2 * 9);
  std::iota(ids.begin(), ids.end(), 60);
  const NamedTensor input{"input_ids", view(std::span(ids), {2, 9})};
  write_safetensors(folder_.file("ids"), std::span(&input, 1));
  std::vector<OwnedTensor> logits;
  for (LoadedModel* model : {&cpu, &gpu}) {
    const std::string file = folder_.file("logits");
    write_logits(*model, folder_.file("ids"), file);
    const SafetensorsReader reader(file);
    logits.emplace_back(DType::kF32, reader.entry("logits").shape);
    reader.read("logits", logits.back());
  }
  const auto found_logits = logits[1].get().span<float>();
  const auto expected_logits = logits[0].get().span<float>();
  for (size_t i = 0; i < expected_logits.size(); ++i)
    ASSERT_NEAR(found_logits[i], expected_logits[i], 1e-4) << i;
}

TEST_F(GpuRuns, BenchTimesSteps) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  settings.model.vocab_size = 320;
  const StepBenchResult result = bench_step({.settings = settings, .steps = 2, .warmup = 1});
  EXPECT_EQ(result.device, "cuda:0");
  EXPECT_GT(result.median(), 0);
  EXPECT_GT(result.operators.at("router"), 0);
  EXPECT_GT(result.operators.at("adamw"), 0);
  EXPECT_GT(result.matrix_peak, 1e12);
  ASSERT_TRUE(result.gpu);
  EXPECT_EQ(result.gpu->num_waits, 1);
  EXPECT_GT(result.gpu->host_seconds, 0);
  EXPECT_LT(result.gpu->host_seconds, result.seconds.back());
  EXPECT_GT(result.gpu->one_by_one.num_operators, 100);
  EXPECT_EQ(result.gpu->one_by_one.num_operations, 0);
  ASSERT_TRUE(result.gpu->graphs);
  EXPECT_EQ(result.gpu->graphs->num_operators, result.gpu->one_by_one.num_operators);
  EXPECT_GE(result.gpu->graphs->num_operations, result.gpu->graphs->num_operators);
  EXPECT_LT(result.gpu->graphs->seconds, result.gpu->one_by_one.seconds);
  EXPECT_EQ(result.gpu->why_no_graph, "");
}

TEST_F(GpuRuns, BenchTimesBlocks) {
  Settings settings = on(DeviceChoice::kCuda, tiny_settings(folder_));
  settings.model.vocab_size = 320;
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    settings.train.precision = precision;
    const LayerBenchResult moe = bench_layer({.settings = settings, .runs = 2, .warmup = 1});
    EXPECT_EQ(moe.device, "cuda:0");
    EXPECT_GT(moe.backward.operators.at("grouped_matmul_wgrad"), 0);
    EXPECT_EQ(std::accumulate(moe.expert_load.begin(), moe.expert_load.end(), 0.0), 2 * 16 * 2);
    const LayerBenchResult attention = bench_layer(
        {.settings = settings, .block = LayerBlock::kAttention, .runs = 1, .warmup = 0});
    EXPECT_GT(attention.backward.median(), 0);
  }
}

}  // namespace
}  // namespace tessera::testing
