#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/format/safetensors.h"
#include "cli/tests/cli_testing.h"
#include "core/file/file.h"
#include "core/memory.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

std::string fixture(const std::string& name) {
  return std::string(TESSERA_TEST_DATA) + "/hf/" + name;
}

/// ‖a − b‖ / ‖b‖ of the logits in two safetensors files.
double logits_error(const std::string& a, const std::string& b) {
  const SafetensorsReader first(a);
  const SafetensorsReader second(b);
  const Shape shape = second.entry("logits").shape;
  const OwnedTensor x(DType::kF32, shape);
  const OwnedTensor y(DType::kF32, shape);
  first.read("logits", x);
  second.read("logits", y);
  double difference = 0;
  double norm = 0;
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const double expected = y.get().as<float>()[i];
    difference += std::pow(x.get().as<float>()[i] - expected, 2);
    norm += expected * expected;
  }
  return std::sqrt(difference / norm);
}

class CliConvert : public CliTest {
 protected:
  double error_of(const std::string& checkpoint, const std::string& name) const {
    const std::string io = fixture(name) + "/io.safetensors";
    succeed({"eval", checkpoint, "--input-ids", io, "--logits", path("logits.safetensors")});
    return logits_error(path("logits.safetensors"), io);
  }
};

TEST_F(CliConvert, AConvertedModelComputesTheSameAndGoesBack) {
  const Finished there = succeed({"convert", fixture("qwen2_moe"), path("own")});
  EXPECT_THAT(there.out, HasSubstr("verified: all 91 tensors"));
  EXPECT_LT(error_of(path("own"), "qwen2_moe"), 1e-5);
  const Json back = succeed_json({"convert", path("own"), path("back"), "--json"});
  EXPECT_EQ(back.at("model_type"), "qwen2_moe");
  EXPECT_TRUE(std::filesystem::exists(path("back/config.json")));
}

/// What trains with multi-token prediction reports its loss, keeps it in checkpoints, and is used
/// without it.
TEST_F(CliConvert, PredictionIsForTrainingAlone) {
  const std::vector<std::string> options = {"--model.mtp_layers=2"};
  EXPECT_THAT(succeed(train("run", options)).out,
              HasSubstr("; 2 MoE layers of 4 experts, top-2, dropless; 2 layers of multi-token"));
  std::ifstream lines(path("run/metrics.jsonl"));
  double first = 0;
  double last = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json json = Json::parse(line);
    if (!json.contains("mtp_loss")) continue;
    last = json.at("mtp_loss");
    if (first == 0) first = last;
  }
  EXPECT_NEAR(first, std::log(320), 0.2);
  EXPECT_LT(last, first - 0.1);
  std::vector<std::string> more = options;
  more.push_back("--train.steps=12");
  EXPECT_THAT(succeed(train("run", more)).out, HasSubstr("12/12"));
  EXPECT_THAT(succeed({"inspect", "--checkpoint", path("run")}).out,
              HasSubstr("mtp.1.embed_proj.weight"));
  succeed({"generate", path("run"), "--prompt", "The ", "--max-tokens", "5"});
  const Json back = succeed_json({"convert", path("run"), path("back"), "--json"});
  EXPECT_THAT(back.at("notes").dump(), HasSubstr("multi-token prediction is left out"));
  succeed({"convert", path("back"), path("again")});
}

TEST_F(CliConvert, WithoutATokenizerTextIsRefused) {
  succeed({"convert", fixture("llama"), path("own")});
  expect_refused({"generate", path("own"), "--prompt", "hello"}, {"came without a tokenizer"});
}

TEST_F(CliConvert, OptionsOfTheOtherDirectionAreRefused) {
  expect_refused({"convert", fixture("llama"), path("own"), "--family", "llama"}, {"--family"});
  succeed({"convert", fixture("llama"), path("own")});
  expect_refused({"convert", path("own"), path("back"), "--pad-vocab-to", "64"},
                 {"--pad-vocab-to"});
  expect_refused({"convert", path("own"), path("own")}, {"exists already"});
}

TEST_F(CliConvert, AFullDiskLeavesNothing) {
  const Finished result =
      run_tessera({"convert", fixture("mixtral"), path("own")}, /*file_limit=*/100000);
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("cannot write"));
  EXPECT_THAT(snapshot(path("")), ::testing::SizeIs(1)) << "text.txt only";
}

/// A new run takes shape and weights from a checkpoint.
TEST_F(CliConvert, TrainingStartsFromConvertedWeights) {
  succeed({"convert", fixture("mixtral"), path("own"), "--vocab-size", "320"});
  const auto arguments = [&](const std::string& run, const std::string& from = "own") {
    return Arguments{"train",
                     "--run.folder=" + path(run),
                     "--run.init_from=" + path(from),
                     "--data.text=" + path("text.txt"),
                     "--data.tokenizer=byte",
                     "--data.sequence_length=16",
                     "--train.steps=2",
                     "--optim.warmup_steps=1",
                     "--run.tensorboard=false",
                     "--run.report=false"};
  };
  succeed(arguments("run"));
  const Json back = succeed_json({"convert", path("run"), path("back"), "--json"});
  EXPECT_EQ(back.at("model_type"), "mixtral");
  Arguments predicting = arguments("predicting");
  predicting.emplace_back("--model.mtp_layers=1");
  EXPECT_THAT(succeed(predicting).out,
              HasSubstr("note: run.init_from: 1 layer of multi-token prediction not in the"));
  Arguments plain = arguments("plain", "predicting");
  plain.emplace_back("--model.mtp_layers=0");
  EXPECT_THAT(
      succeed(plain).out,
      HasSubstr("note: run.init_from: 1 layer of multi-token prediction of the checkpoint"));
  Arguments other = arguments("other");
  other.emplace_back("--model.num_layers=3");
  const Finished refused = run_tessera(other);
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err,
              ::testing::AllOf(HasSubstr("run.init_from"), HasSubstr("layers.2.attn.q.weight")));
  // A run that has begun goes on without.
  std::filesystem::remove_all(path("own"));
  Arguments longer = arguments("run");
  longer.emplace_back("--train.steps=3");
  EXPECT_THAT(succeed(longer).out, HasSubstr("continuing after step 2 of 3"));
  expect_refused(arguments("new"), {"run.init_from: " + path("own") + " does not exist"});
}

/// All that a family's configuration says reaches the run, and goes back with its weights.
TEST_F(CliConvert, ConvertedModelsOfManyKindsTrainOn) {
  for (const std::string name :
       {"granitemoehybrid_dense", "lfm2_moe_biases", "mimo_v2_flash", "deepseek_v3_mtp"}) {
    SCOPED_TRACE(name);
    const std::string own = path(name);
    const std::string run = path(name + "-run");
    const std::string back = path(name + "-back");
    succeed({"convert", fixture(name), own, "--vocab-size", "320"});
    succeed({"train", "--run.folder=" + run, "--run.init_from=" + own,
             "--data.text=" + path("text.txt"), "--data.tokenizer=byte",
             "--data.sequence_length=16", "--train.steps=1", "--train.micro_batch=1",
             "--train.global_batch=1", "--run.tensorboard=false", "--run.report=false"});
    succeed({"convert", run, back, "--like", own});
    EXPECT_EQ(read_text_file(back + "/config.json"),
              read_text_file(fixture(name) + "/config.json"));
  }
}

TEST_F(CliConvert, UpcyclingKeepsTheFirstForwardPass) {
  const Finished result = succeed({"upcycle", fixture("qwen3"), path("experts"), "--experts", "4",
                                   "--granularity", "2", "--top-k", "4"});
  EXPECT_THAT(result.out, HasSubstr("8 experts of inner size 28"));
  EXPECT_LT(error_of(path("experts"), "qwen3"), 1e-5);
  const Json back = succeed_json({"convert", path("experts"), path("back"), "--json"});
  EXPECT_EQ(back.at("model_type"), "qwen3_moe");
}

TEST_F(CliConvert, AModelWithoutATokenizerTakesNoText) {
  succeed({"convert", fixture("llama"), path("own")});
  const Finished refused = run_tessera({"generate", path("own"), "--prompt", "hi"});
  EXPECT_EQ(refused.out, "");
  expect_error(refused, {"came without a tokenizer", "token file"});
}

TEST_F(CliConvert, ATrainedModelTakesItsTokenizerAlong) {
  const std::string tokenizer = path("learnt.json");
  succeed({"tokenize", path("text.txt"), "--train", tokenizer, "--vocab-size", "300"});
  succeed(train("run", {"--data.tokenizer=" + tokenizer}));
  succeed({"convert", path("run"), path("exported")});
  EXPECT_EQ(read_all(path("exported/tokenizer.json")), read_all(tokenizer));
  EXPECT_EQ(Json::parse(read_all(path("exported/tokenizer_config.json"))).at("eos_token"),
            "<|endoftext|>");
  succeed(train("bytes"));
  EXPECT_THAT(succeed({"convert", path("bytes"), path("exported-bytes")}).out,
              HasSubstr("bytes need no tokenizer file"));
  // Where transformers ends a text, in place of what the family's own tokenizer has there.
  for (const auto& [folder, end] : {std::pair("exported", 0), std::pair("exported-bytes", 256)}) {
    const Json config = Json::parse(read_all(path(folder) + "/config.json"));
    EXPECT_EQ(config.at("eos_token_id"), end) << folder;
    EXPECT_EQ(config.at("bos_token_id"), nullptr) << folder;
  }
}

}  // namespace
}  // namespace tessera
