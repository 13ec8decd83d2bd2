#include "train/tune/tune_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "train/metrics/jsonl.h"
#include "train/run/run_record.h"
#include "train/testing/tiny_run.h"
#include "train/tune/answers_testing.h"
#include "train/tune/policy.h"
#include "train/tune/rollout.h"
#include "train/tune/tune_run_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::vector<std::vector<float>> no_weights(const Rollout& rollout) {
  std::vector<std::vector<float>> weights;
  for (const Answer& answer : rollout.answers)
    weights.emplace_back(static_cast<size_t>(answer.num_tokens()));
  return weights;
}

using TuneRun = testing::TuneRunTest;

TEST_F(TuneRun, RewardsRise) {
  Settings own = rl_settings("rises");
  own.data.packing = Packing::kBestFit;
  own.train.global_batch = 32;
  own.train.micro_batch = 16;
  own.rl.group_size = 16;
  own.train.steps = own.schedule.num_steps = 25;
  own.schedule.kind = ScheduleKind::kConstant;
  own.run.checkpoint_interval = 0;
  const auto records = run(own);
  ASSERT_EQ(records.size(), 25U);
  EXPECT_LT(number(records.front(), "reward_mean"), 0.2);
  EXPECT_GT(number(records.back(), "reward_mean"), 0.7) << out_.str();
  for (const StepRecord& record : records)
    EXPECT_LT(std::abs(number(record, "generator_kl")), 1e-4) << record.step;
}

/// Replayed routing: the trainer's log-probabilities are the generator's.
TEST_F(TuneRun, ReplaysTheGeneratorsRouting) {
  Settings own = rl_settings("replays");
  own.data.packing = Packing::kBestFit;
  own.rl.router_replay = true;
  for (const StepRecord& record : run(own))
    EXPECT_LT(number(record, "generator_error"), 1e-5) << record.step;

  own.run.folder = folder_.file("experts");
  const auto trainer = open(own);
  Rollout rollout = RolloutWriter(*trainer).write(3);
  const size_t of_token = 2 * 2;  // MoE layers, experts of a token
  for (const Answer& answer : rollout.answers)
    EXPECT_EQ(answer.experts.size(), (answer.tokens.size() - 1) * of_token);
  AnswerBatches batches(own, trainer->fewest_batches(), 0, rollout.answers);
  BatchShape shape = trainer->model().batch_shape();
  shape.tells_routing = true;
  ForwardModel model(trainer->settings().model, shape, ForwardGoal::kLoss, trainer->backend(),
                     trainer->state().parameters(), trainer->state().experts());
  for (Batch& batch : batches.weigh(no_weights(rollout))) {
    for (const bool is_other : {false, true}) {
      if (is_other) {
        for (int32_t& expert : batch.experts) expert = expert < 0 ? expert : (expert + 1) % 4;
      }
      pad_sequences(batch, shape.max_sequences);
      model.run_loss(view_batch(batch));
      const auto chosen = model.chosen_experts().span<int32_t>();
      int64_t given = 0;
      for (size_t i = 0; i < batch.experts.size(); ++i) {
        if (batch.experts[i] < 0) continue;
        ++given;
        EXPECT_EQ(chosen[i], batch.experts[i]);
      }
      EXPECT_GT(given, 100);
    }
  }
}

TEST_F(TuneRun, ContinuesWithTheSameBits) {
  for (const bool is_dpo : {false, true}) {
    Settings own = is_dpo ? dpo_settings("dpo") : rl_settings("rl");
    own.data.packing = Packing::kBestFit;
    own.train.steps = own.schedule.num_steps = 4;
    own.run.checkpoint_interval = 2;
    own.run.keep_last = 0;
    if (!is_dpo) {
      own.rl.updates = 2;
      own.rl.kl_coefficient = 0.1;
    }
    const auto whole = run(own);
    const std::filesystem::path last =
        std::filesystem::path(own.run.folder) / "checkpoints" / "step-00000004";
    const auto files_of = [&] {
      std::map<std::string, std::string> files;
      for (const auto& entry : std::filesystem::directory_iterator(last)) {
        if (entry.path().extension() == ".safetensors")
          files[entry.path().filename().string()] = read_text_file(entry.path().string());
      }
      return files;
    };
    const auto expected = files_of();
    ASSERT_FALSE(expected.empty());
    std::filesystem::remove_all(last);
    const auto again = run(own);
    EXPECT_TRUE(files_of() == expected);
    ASSERT_EQ(again.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(again[i].loss, whole[i].loss);
  }
}
/// The logits that are clipped are those of the passes that learn; scores are found without.
TEST_F(TuneRun, HeadsAreClipped) {
  for (const auto& [name, all] : {std::pair("dpo", dpo_settings("dpo-clipped")),
                                  std::pair("rl", rl_settings("rl-clipped"))}) {
    Settings own = all;
    own.train.steps = own.schedule.num_steps = 2;
    own.qk_clip = 1e-3;
    own.rl.kl_coefficient = 0.1;
    for (const StepRecord& record : run(own)) EXPECT_GT(record.clipped_heads, 0) << name;
  }
}

/// What a step learns from answers does not depend on which share a row.
TEST_F(TuneRun, PackedAnswersGiveTheSameStep) {
  Settings own = rl_settings("packed");
  own.train.micro_batch = 2;
  own.train.global_batch = 16;
  own.optimizer.eps = 1e-3;
  const auto answers = testing::draw_answers(16, own.data.sequence_length);
  std::vector<std::vector<double>> scores[2];
  std::vector<std::vector<float>> weights;
  Random random(8, 8);
  for (const Answer& answer : answers) {
    auto& one = weights.emplace_back();
    for (int64_t i = 0; i < answer.num_tokens(); ++i)
      one.push_back(static_cast<float>(random.next_normal()));
  }
  std::unique_ptr<Trainer> trainers[2];
  size_t num_batches[2];
  for (const bool packs : {false, true}) {
    own.run.folder = folder_.file(packs ? "packed" : "apart");
    own.data.packing = packs ? Packing::kBestFit : Packing::kStream;
    Trainer& trainer = *(trainers[packs] = open(own));
    EXPECT_EQ(trainer.fewest_batches(), packs ? 1 : 8);
    AnswerBatches batches(own, trainer.fewest_batches(), 0, answers);
    AnswerScorer scorer = score_trainer(trainer);
    scores[packs] = batches.score(scorer);
    const auto weighed = batches.weigh(weights);
    num_batches[packs] = weighed.size();
    trainer.give_batches(weighed);
    trainer.step();
    EXPECT_NEAR(trainer.step_flops() / static_cast<double>(weighed.size()),
                trainer.model().model_flops(), 1);
  }
  EXPECT_EQ(num_batches[0], 8U);
  EXPECT_LE(num_batches[1], 6U);
  for (size_t i = 0; i < answers.size(); ++i) {
    ASSERT_EQ(scores[1][i].size(), scores[0][i].size());
    for (size_t k = 0; k < scores[0][i].size(); ++k)
      EXPECT_NEAR(scores[1][i][k], scores[0][i][k], 1e-5) << i << " " << k;
  }
  for (const ModelParameter& parameter : trainers[0]->state().parameters().all()) {
    const auto expected = parameter.weight.span<float>();
    const auto found =
        trainers[1]->state().parameters().find(parameter.spec.name).weight.span<float>();
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], 1e-5) << parameter.spec.name << " " << i;
  }
  // As many as the settings have are taken too, and more or none are not.
  AnswerBatches whole(own, 8, 0, answers);
  trainers[1]->give_batches(whole.weigh(weights));
  trainers[1]->step();
  EXPECT_THAT([&] { trainers[1]->give_batches({}); },
              ThrowsMessage<UserError>(HasSubstr("takes 1 to 8 micro-batches, found 0")));
  EXPECT_THAT([&] { trainers[0]->give_batches({}); },
              ThrowsMessage<UserError>(HasSubstr("takes 8 micro-batches, found 0")));
}

/// The reference is the model that they begin with.
TEST_F(TuneRun, AdaptersAreTrainedAlone) {
  Settings base = rl_settings("base");
  base.train.steps = base.schedule.num_steps = 1;
  run(base);
  const auto adapting = [&](Settings own) {
    own.run.init_from = base.run.folder;
    own.model.lora = {.rank = 4, .alpha = 8};
    return run(own);
  };
  const auto preferences = adapting(dpo_settings("dpo"));
  EXPECT_NEAR(preferences.front().loss, std::log(2.0), 1e-6);
  EXPECT_GT(number(preferences.back(), "margin"), 0);
  Settings rl = rl_settings("rl");
  rl.rl.kl_coefficient = 0.1;
  const auto rewards = adapting(rl);
  EXPECT_NEAR(number(rewards.front(), "reference_kl"), 0, 1e-9);
  EXPECT_GT(number(rewards.back(), "reference_kl"), 0);
  for (const StepRecord& record : rewards)
    EXPECT_LT(std::abs(number(record, "generator_kl")), 1e-4) << record.step;
}

/// Weights enter as labels do: every layout gives one rank's step.
TEST_F(TuneRun, WeightedStepsAgreeOverLayouts) {
  Settings own = rl_settings("layouts");
  own.rl.router_replay = true;
  own.rl.max_tokens = 4;
  own.data.sequence_length = 16;
  own.train.micro_batch = 1;
  own.train.global_batch = 4;
  own.optimizer.eps = 1e-3;
  struct Case {
    int64_t num_ranks;
    LayoutSpec layout;
  };
  std::vector<Batch> batches;
  Random random(3, 3);
  for (int row = 0; row < 4; ++row) {
    Batch batch;
    for (int32_t i = 0; i < 16; ++i) {
      batch.tokens.push_back(static_cast<int32_t>(random.next_below(250)));
      batch.labels.push_back(i < 4 ? kNoLabel : static_cast<int32_t>(random.next_below(250)));
      batch.positions.push_back(i);
      batch.weights.push_back(static_cast<float>(random.next_normal()));
    }
    for (int32_t i = 0; i < 2 * 16; ++i) {
      const bool is_given = i % 3 != 0;
      batch.experts.insert(batch.experts.end(),
                           {is_given ? i % 4 : -1, is_given ? (i + 1) % 4 : -1});
    }
    batch.cu_seqlens = {0, 16};
    batch.num_valid = 12;
    batches.push_back(batch);
  }
  const auto train = [&](const Case& c) {
    RunRecord record;
    std::mutex mutex;
    run_thread_world(c.num_ranks, [&](World& world) {
      Settings of_rank = own;
      of_rank.parallel.layout = c.layout;
      TrainingData data = prepare_without_data(of_rank);
      Trainer trainer(std::move(of_rank), std::move(data), world, choose_host);
      trainer.resume("");
      std::vector<Batch> given;
      for (int64_t i = 0; i < trainer.layout().num_micro_batches; ++i)
        given.push_back(batches[trainer.layout().micro_batch(i)]);
      trainer.give_batches(given);
      const StepOutcome outcome = trainer.step();
      trainer.state().wait_weights();
      const std::scoped_lock lock(mutex);
      record.outcomes = {outcome};
      gather_parts(trainer.state().optimizer().weight_slices(HeldPart::kOwned), record.weights);
    });
    return record;
  };
  const RunRecord expected = train({1, {}});
  for (const Case& c : {Case{2, {.tp = 2}}, Case{2, {.pp = 2}}, Case{2, {.cp = 2}},
                        Case{4, {.dp = 4, .ep = 4}}, Case{4, {.tp = 2, .pp = 2}}}) {
    SCOPED_TRACE(describe_degrees(Layout(c.layout, c.num_ranks)));
    const RunRecord found = train(c);
    EXPECT_NEAR(found.outcomes[0].loss, expected.outcomes[0].loss, 1e-5);
    EXPECT_NEAR(found.outcomes[0].update.grad_norm, expected.outcomes[0].update.grad_norm, 1e-4);
    for (const auto& [name, whole] : expected.weights) {
      const std::vector<float>& values = found.weights.at(name).values;
      for (size_t i = 0; i < whole.values.size(); ++i)
        ASSERT_NEAR(values[i], whole.values[i], 2e-5) << name << " " << i;
    }
  }
}

TEST_F(TuneRun, WhatCannotBeTrainedIsRefused) {
  Settings own = rl_settings("refused");
  const auto refused = [&](const std::function<void(Settings&)>& change) {
    Settings wrong = own;
    change(wrong);
    return refusal(wrong);
  };
  EXPECT_THAT(refused([](Settings& s) { s.rl.group_size = 3; }),
              HasSubstr("must be a multiple of rl.group_size 3"));
  EXPECT_THAT(refused([](Settings& s) { s.rl.max_tokens = 24; }), HasSubstr("rl.max_tokens is 24"));
  EXPECT_THAT(refused([](Settings& s) { s.rl.max_tokens = 20; }), HasSubstr("must hold both"));
  EXPECT_THAT(refused([](Settings& s) { s.rl.prompts = "x.jsonl"; }),
              HasSubstr("set rl.reward_command"));
  const std::string prompts = folder_.file("prompts.jsonl");
  std::ofstream(prompts) << "{\"prompt\": \"a\"}\n\n{\"prompt\": \"" << std::string(30, 'b')
                         << "\"}\n";
  EXPECT_THAT(refused([&](Settings& s) {
                s.rl.prompts = prompts;
                s.rl.reward_command = "exit 1";
              }),
              HasSubstr("prompts.jsonl, line 3: the prompt \"bbb"));
  EXPECT_THAT(refused([](Settings& s) { s.rl.reward_command = "yes 1e300 | head -n 16"; }),
              HasSubstr("line 1 of its output is \"1e300\", expected a number of at most 1e+30"));
  EXPECT_THAT(refused([](Settings& s) { s.rl.updates = 3; }), HasSubstr("must be multiples"));
  EXPECT_THAT(refused([](Settings& s) { s.model.mtp_layers = 1; }),
              HasSubstr("model.mtp_layers is set"));
  EXPECT_THAT(refused([](Settings& s) { s.model.moe.capacity_factor = 2; }),
              HasSubstr("moe.capacity_factor is set"));
  EXPECT_THAT(refused([](Settings& s) { s.data.text = "a.txt"; }), HasSubstr("data.text is set"));
  EXPECT_THAT(refused([](Settings& s) { s.data.tokens = "a"; }), HasSubstr("data.tokens is set"));
  EXPECT_THAT(refused([](Settings& s) { s.train.validation_interval = 50; }),
              HasSubstr("train.validation_interval is set, but train.objective is \"grpo\""));
  EXPECT_THAT(refused([](Settings& s) { s.rl.reward_command = "exit 1"; }),
              HasSubstr("exit code 1"));
  own = dpo_settings("refused");
  EXPECT_THAT(refused([](Settings& s) { s.dpo.pairs.clear(); }), HasSubstr("set dpo.pairs"));
  EXPECT_THAT(refused([](Settings& s) { s.data.sequence_length = 6; }),
              HasSubstr("line 1: \"prompt\" and \"rejected\" have"));
  std::ofstream(own.dpo.pairs) << "{\"prompt\": \"a\", \"chosen\": \"b\"}\n";
  EXPECT_THAT(refusal(own), HasSubstr("line 1: there is no text \"rejected\""));
}

}  // namespace
}  // namespace tessera
