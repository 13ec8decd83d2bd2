#include "hf/convert.h"

#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "hf/config/write_config.h"
#include "hf/convert_testing.h"
#include "hf/hf_record.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::string text_of(const fs::path& path) {
  return read_text_file(path);
}

/// What the names of a layer's tensors begin with.
std::string layer_prefix(const ImportedConfig& config, int64_t layer) {
  const PredictionNames names = config.family->predictions;
  const int64_t depth = layer - config.model.num_layers;
  if (depth >= 0 && names == PredictionNames::kApart) return fmt::format("mtp.layers.{}.", depth);
  if (depth >= 0 && names == PredictionNames::kStreams) return fmt::format("mtp.{}.", depth);
  return fmt::format("model.layers.{}.", layer);
}

/// Experts of each layer in two tensors, as transformers 5 names them.
LooseTensors fuse_experts(const LooseTensors& tensors, const std::string& fixture) {
  const ImportedConfig config = fixture_config(fixture);
  const auto& [gate, up, down] = config.family->expert_names;
  LooseTensors fused;
  for (const auto& [name, tensor] : tensors) {
    std::string plain = name;
    const auto moe = name.find(".block_sparse_moe.");
    if (moe != std::string::npos) plain.replace(moe, 18, ".mlp.");
    const bool is_correction = name.ends_with(config.family->correction_name);
    if (name.find(".experts.") == std::string::npos || is_correction) fused[plain] = tensor;
  }
  const ModelConfig& model = config.model;
  for (int64_t layer = 0; layer < model.all_layers(); ++layer) {
    if (!model.is_moe_layer(layer)) continue;
    const std::string of_layer = layer_prefix(config, layer);
    const std::string from = fmt::format("{}{}.experts.", of_layer, config.family->moe_name);
    const bool renamed = config.family->moe_name == "block_sparse_moe";
    const std::string to =
        fmt::format("{}{}.experts.", of_layer, renamed ? "mlp" : config.family->moe_name);
    const int64_t count = model.moe.num_experts;
    const int64_t inner = model.moe.inner_size;
    LooseTensor gate_up{DType::kF32, {count, 2 * inner, model.hidden_size}, {}};
    LooseTensor downs{DType::kF32, {count, model.hidden_size, inner}, {}};
    for (int64_t e = 0; e < count; ++e) {
      const auto append = [&](LooseTensor& into, std::string_view part) {
        const auto& bytes = tensors.at(fmt::format("{}{}.{}.weight", from, e, part)).bytes;
        into.bytes.insert(into.bytes.end(), bytes.begin(), bytes.end());
      };
      append(gate_up, gate);
      append(gate_up, up);
      append(downs, down);
    }
    fused[to + "gate_up_proj"] = std::move(gate_up);
    fused[to + "down_proj"] = std::move(downs);
  }
  return fused;
}

class RoundTrip : public ::testing::TestWithParam<std::string> {
 protected:
  ModelConfig model() const { return fixture_config(GetParam()).model; }
  ScratchFolder scratch_;
};

TEST_P(RoundTrip, GivesBackEveryByte) {
  const LooseTensors expected = read_loose(hf_fixture(GetParam()));
  const auto imported = import_plain(hf_fixture(GetParam()), scratch_ / "own");
  EXPECT_EQ(imported.num_source_tensors, std::ssize(expected));
  EXPECT_EQ(imported.num_verified, std::ssize(expected));
  EXPECT_EQ(imported.num_narrowed, 0);
  export_plain(scratch_ / "own", scratch_ / "back", model(), DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "back"), expected);
  EXPECT_EQ(text_of(scratch_ / "back/config.json"),
            text_of(hf_fixture(GetParam()) / "config.json"));
  EXPECT_EQ(list(scratch_.path()), (std::vector<std::string>{"back", "own"}));
}

TEST_P(RoundTrip, GivesBackEveryByteThroughShards) {
  const LooseTensors expected = read_loose(hf_fixture(GetParam()));
  const auto small = [](auto& request) { request.options.shard_bytes = 20000; };
  import_plain(hf_fixture(GetParam()), scratch_ / "own", small);
  EXPECT_TRUE(fs::exists(scratch_ / "own/model-00001.safetensors"));
  export_plain(scratch_ / "own", scratch_ / "back", model(), DType::kF32, small);
  EXPECT_TRUE(fs::exists(scratch_ / "back/model.safetensors.index.json"));
  EXPECT_EQ(read_loose(scratch_ / "back"), expected);
  import_plain(scratch_ / "back", scratch_ / "again");
  EXPECT_EQ(read_loose(scratch_ / "again/model-00000.safetensors").size(),
            CheckpointReader(scratch_ / "own").manifest().tensors.size());
}

TEST_P(RoundTrip, ReadsAndWritesFusedExperts) {
  const Family& family = *read_hf_config(hf_fixture(GetParam())).family;
  if (!family.is_moe()) GTEST_SKIP() << "a dense family";
  if (family.expert_tensors != ExpertTensors::kPlain) GTEST_SKIP() << "always fused";
  if (family.plain_mlps) GTEST_SKIP() << "never fused";
  const LooseTensors plain = read_loose(hf_fixture(GetParam()));
  LooseTensors fused = fuse_experts(plain, GetParam());
  write_model(scratch_ / "fused", GetParam(), fused);
  import_plain(scratch_ / "fused", scratch_ / "own");
  export_plain(scratch_ / "own", scratch_ / "back", model(), DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "back"), fused) << "the layout as it came";
  export_plain(scratch_ / "own", scratch_ / "split", model(), DType::kF32,
               [](ExportRequest& request) { request.fused_experts = false; });
  EXPECT_EQ(read_loose(scratch_ / "split"), plain);
  import_plain(hf_fixture(GetParam()), scratch_ / "own2");
  EXPECT_EQ(read_loose(scratch_ / "own/model-00000.safetensors"),
            read_loose(scratch_ / "own2/model-00000.safetensors"));
}

TEST_P(RoundTrip, GivesBackBf16ThroughEitherPrecision) {
  LooseTensors narrow = read_loose(hf_fixture(GetParam()));
  for (auto& [name, tensor] : narrow) {
    const bool stays = name.ends_with("e_score_correction_bias") ||
                       name.ends_with("mlp.expert_bias") || name.ends_with("gate.tid2eid");
    if (!stays) tensor = convert_loose(tensor, DType::kBF16);
  }
  write_model(scratch_ / "bf16", GetParam(), narrow);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::string own = fmt::format("own-{}", dtype_name(dtype));
    const auto report =
        import_plain(scratch_ / "bf16", scratch_ / own,
                     [&](ImportRequest& request) { request.options.dtype = dtype; });
    EXPECT_EQ(report.num_narrowed, 0);
    export_plain(scratch_ / own, scratch_ / ("back-" + own), model(), dtype);
    EXPECT_EQ(read_loose(scratch_ / ("back-" + own)), narrow);
  }
}

TEST_P(RoundTrip, NarrowsWhenAskedTo) {
  const auto report = import_plain(hf_fixture(GetParam()), scratch_ / "own",
                                   [](auto& request) { request.options.dtype = DType::kBF16; });
  EXPECT_GT(report.num_narrowed, 0);
  EXPECT_LT(report.num_narrowed, report.num_verified) << "norms stay F32";
  export_plain(scratch_ / "own", scratch_ / "back", model(), DType::kBF16);
  const LooseTensors back = read_loose(scratch_ / "back");
  for (const auto& [name, tensor] : read_loose(hf_fixture(GetParam()))) {
    EXPECT_EQ(back.at(name), convert_loose(tensor, back.at(name).dtype)) << name;
  }
}

TEST_P(RoundTrip, PadsTheVocabularyAndRemovesThePadding) {
  constexpr int64_t kMultiple = 37;
  const auto pad = [](ImportRequest& request) { request.pad_vocab_to = kMultiple; };
  import_plain(hf_fixture(GetParam()), scratch_ / "own", pad);
  ModelConfig padded = model();
  padded.vocab_size = (padded.vocab_size / kMultiple + 1) * kMultiple;
  const auto own = read_loose(scratch_ / "own/model-00000.safetensors");
  EXPECT_EQ(own.at("embedding.weight").shape, (Shape{padded.vocab_size, padded.hidden_size}));
  export_plain(scratch_ / "own", scratch_ / "back", padded, DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "back"), read_loose(hf_fixture(GetParam())));
}

/// Without what came along, config.json is made from the model.
TEST_P(RoundTrip, MakesAConfigurationOfItsOwn) {
  import_plain(hf_fixture(GetParam()), scratch_ / "own");
  fs::remove_all(scratch_ / "own/huggingface");
  const ImportedConfig expected = read_hf_config(hf_fixture(GetParam()));
  const auto report = export_plain(scratch_ / "own", scratch_ / "back", model(), DType::kF32,
                                   [&](ExportRequest& request) {
                                     request.family = expected.family->model_type;
                                     request.max_length = expected.max_length;
                                   });
  EXPECT_EQ(report.model_type, expected.family->model_type);
  const ImportedConfig made = read_hf_config(scratch_ / "back");
  EXPECT_THAT(find_differences(made.model, expected.model), ::testing::IsEmpty());
  EXPECT_EQ(made.model.moe.balance_coefficient, expected.model.moe.balance_coefficient);
  EXPECT_EQ(made.max_length, expected.max_length);
  EXPECT_EQ(read_loose(scratch_ / "back"), read_loose(hf_fixture(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(Fixtures, RoundTrip, ::testing::ValuesIn(hf_fixtures()),
                         [](const auto& info) { return hf_fixture_label(info.param); });

class Refusal : public ConversionTest {};

/// As Qwen3.5 is published: the text part below another name, beside encoders.
/// Published files call Kimi Linear's dense MLPs otherwise than those that transformers writes.
TEST(KimiLinear, DenseMlpsKeepTheNameThatTheyCameWith) {
  const ScratchFolder scratch;
  make_folder(scratch / "hf");
  fs::copy_file(hf_fixture("kimi_linear") / "config.json", scratch / "hf/config.json");
  LooseTensors tensors;
  for (const auto& [name, tensor] : read_loose(hf_fixture("kimi_linear"))) {
    std::string written = name;
    if (const auto at = name.find(".mlp."); at != std::string::npos)
      written.replace(at, 5, ".block_sparse_moe.");
    tensors[written] = tensor;
  }
  write_loose(scratch / "hf/model.safetensors", tensors);
  import_plain(scratch / "hf", scratch / "own");
  export_plain(scratch / "own", scratch / "back", fixture_config("kimi_linear").model, DType::kF32);
  EXPECT_EQ(read_loose(scratch / "back"), tensors);
}

TEST_F(Refusal, OfAModelWithEncodersTheTextPartIsTaken) {
  const std::string fixture = "qwen3_5_moe_text";
  const LooseTensors plain = read_loose(hf_fixture(fixture));
  LooseTensors whole;
  for (const auto& [name, tensor] : plain)
    whole["model.language_model." + name.substr(std::string("model.").size())] = tensor;
  whole["model.visual.patch_embed.proj.weight"] = plain.begin()->second;
  write_model(scratch_ / "whole", fixture, whole);
  nlohmann::json text =
      nlohmann::json::parse(read_text_file(scratch_ / "whole" / "config.json", int64_t{1} << 20));
  text.erase("architectures");
  const nlohmann::json config = {
      {"model_type", "qwen3_5_moe"}, {"tie_word_embeddings", true}, {"text_config", text}};
  write_file_synced(scratch_ / "whole" / "config.json", config.dump());
  const ConvertReport report = import_plain(scratch_ / "whole", scratch_ / "imported");
  EXPECT_THAT(fmt::format("{}", fmt::join(report.notes, "\n")), HasSubstr("1 tensors of encoders"));
  const ImportedConfig read = read_hf_config(hf_fixture(fixture));
  export_plain(scratch_ / "imported", scratch_ / "exported", read.model, DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "exported"), plain);
  EXPECT_THAT(find_differences(read_hf_config(scratch_ / "exported").model, read.model),
              ::testing::IsEmpty());
  whole["model.norm.weight"] = plain.at("model.norm.weight");
  write_loose(scratch_ / "whole" / kHfWeightsFile, whole);
  EXPECT_THAT(error_of([&] { import_plain(scratch_ / "whole", scratch_ / "again"); }),
              HasSubstr("twice"));
}

/// As Llama 4 is published: all of the text's tensors below another name.
TEST_F(Refusal, OfLlama4WithEncodersTheTextPartIsTaken) {
  const std::string fixture = "llama4";
  const LooseTensors plain = read_loose(hf_fixture(fixture));
  LooseTensors whole;
  for (const auto& [name, tensor] : plain) whole["language_model." + name] = tensor;
  whole["vision_model.class_embedding"] = plain.begin()->second;
  whole["multi_modal_projector.linear_1.weight"] = plain.begin()->second;
  write_model(scratch_ / "whole", fixture, whole);
  nlohmann::json text =
      nlohmann::json::parse(read_text_file(scratch_ / "whole" / "config.json", int64_t{1} << 20));
  text.erase("architectures");
  write_file_synced(scratch_ / "whole" / "config.json",
                    nlohmann::json{{"model_type", "llama4"}, {"text_config", text}}.dump());
  const ConvertReport report = import_plain(scratch_ / "whole", scratch_ / "imported");
  EXPECT_THAT(fmt::format("{}", fmt::join(report.notes, "\n")), HasSubstr("2 tensors of encoders"));
  const ImportedConfig read = read_hf_config(hf_fixture(fixture));
  export_plain(scratch_ / "imported", scratch_ / "exported", read.model, DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "exported"), plain);
}

/// As Gemma 4 is published.
TEST_F(Refusal, OfGemmaWithEncodersTheTextPartIsTaken) {
  const std::string fixture = "gemma4_text";
  const LooseTensors plain = read_loose(hf_fixture(fixture));
  LooseTensors whole;
  for (const auto& [name, tensor] : plain)
    whole["model.language_model." + name.substr(std::string("model.").size())] = tensor;
  whole["model.vision_tower.encoder.layers.0.mlp.gate_proj.weight"] = plain.begin()->second;
  whole["model.embed_vision.embedding_projection.weight"] = plain.begin()->second;
  write_model(scratch_ / "whole", fixture, whole);
  nlohmann::json text =
      nlohmann::json::parse(read_text_file(scratch_ / "whole" / "config.json", int64_t{1} << 20));
  text.erase("architectures");
  const nlohmann::json config = {{"model_type", "gemma4"}, {"text_config", text}};
  write_file_synced(scratch_ / "whole" / "config.json", config.dump());
  const ConvertReport report = import_plain(scratch_ / "whole", scratch_ / "imported");
  EXPECT_THAT(fmt::format("{}", fmt::join(report.notes, "\n")), HasSubstr("2 tensors of encoders"));
  const ImportedConfig read = read_hf_config(hf_fixture(fixture));
  EXPECT_TRUE(read.model.tie_embeddings);
  export_plain(scratch_ / "imported", scratch_ / "exported", read.model, DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "exported"), plain);
}

TEST_F(Refusal, ListsMissingLeftOverAndMisshapenTensors) {
  const std::string error = import_changed([](LooseTensors& tensors) {
    tensors.erase("model.layers.1.block_sparse_moe.experts.3.w2.weight");
    tensors["model.layers.0.self_attn.q_proj.bias"] = {DType::kF32, {1}, std::vector<std::byte>(4)};
    tensors.at("model.norm.weight").shape = {2, 16};
  });
  EXPECT_THAT(error,
              HasSubstr("missing (1): 'model.layers.1.block_sparse_moe.experts.3.w2.weight'"));
  EXPECT_THAT(error, HasSubstr("left over (1): 'model.layers.0.self_attn.q_proj.bias'"));
  EXPECT_THAT(error, HasSubstr("'model.norm.weight is [2, 16] instead of [32]'"));
}

TEST_F(Refusal, NamesWeightsThatAreNotFinite) {
  const auto ruin = [](LooseTensors& tensors) {
    LooseTensor& tensor = tensors.at("model.norm.weight");
    tensor = convert_loose(tensor, DType::kF32);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(tensor.bytes.data() + 8, &nan, sizeof(nan));
  };
  EXPECT_THAT(import_changed(ruin), HasSubstr("the tensor 'model.norm.weight' has 1 element that "
                                              "is NaN or infinite"));
  const auto report = import_plain(scratch_ / "source", scratch_ / "own",
                                   [](ImportRequest& r) { r.options.allow_nonfinite = true; });
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("'model.norm.weight' has 1 element")));
}

TEST_F(Refusal, NamesValuesThatANarrowerTypeDoesNotHold) {
  LooseTensors tensors = read_loose(hf_fixture("llama"));
  LooseTensor& table = tensors.at("model.embed_tokens.weight");
  table = convert_loose(table, DType::kF32);
  const float most = std::numeric_limits<float>::max();
  std::memcpy(table.bytes.data(), &most, sizeof(most));
  write_model(scratch_ / "source", "llama", tensors);
  EXPECT_THAT(import_error(scratch_ / "source",
                           [](ImportRequest& request) { request.options.dtype = DType::kBF16; }),
              HasSubstr("too large for the type written"));
}

TEST_F(Refusal, NamesTypesThatAreNoWeights) {
  EXPECT_THAT(import_changed([](LooseTensors& tensors) {
                LooseTensor& tensor = tensors.at("model.norm.weight");
                tensor = {DType::kI32, tensor.shape, tensor.bytes};
              }),
              HasSubstr("tensor 'model.norm.weight' is of type i32"));
}

TEST_F(Refusal, NamesATensorThatIsInTwoShards) {
  LooseTensors tensors = read_loose(hf_fixture("llama"));
  write_model(scratch_ / "source", "llama", tensors);
  fs::rename(scratch_ / "source/model.safetensors", scratch_ / "source/a.safetensors");
  LooseTensors again = {{"model.norm.weight", tensors.at("model.norm.weight")}};
  write_loose(scratch_ / "source/b.safetensors", again);
  nlohmann::json map;
  for (const auto& [name, tensor] : tensors) map[name] = "a.safetensors";
  map["model.norm.weight"] = "b.safetensors";
  const nlohmann::json index = {{"metadata", nlohmann::json::object()}, {"weight_map", map}};
  write_file_synced(scratch_ / "source/model.safetensors.index.json", index.dump());
  EXPECT_THAT(import_error(scratch_ / "source"), HasSubstr("'model.norm.weight' is in two files"));
}

TEST_F(Refusal, NamesTensorsThatTheIndexMisplacesOrOmits) {
  LooseTensors tensors = read_loose(hf_fixture("llama"));
  write_model(scratch_ / "source", "llama", tensors);
  fs::rename(scratch_ / "source/model.safetensors", scratch_ / "source/a.safetensors");
  nlohmann::json map;
  for (const auto& [name, tensor] : tensors) map[name] = "a.safetensors";
  const auto write = [&] {
    const nlohmann::json index = {{"weight_map", map}};
    write_file_synced(scratch_ / "source/model.safetensors.index.json", index.dump());
  };
  map["no.such.tensor"] = "a.safetensors";
  write();
  EXPECT_THAT(import_error(scratch_ / "source"),
              HasSubstr("not in the files that it names: 'no.such"));
  map.erase("no.such.tensor");
  map.erase("lm_head.weight");
  write();
  EXPECT_THAT(import_error(scratch_ / "source"), HasSubstr("it does not list: 'lm_head.weight'"));
  map["lm_head.weight"] = "../a.safetensors";
  write();
  EXPECT_THAT(import_error(scratch_ / "source"), HasSubstr("'../a.safetensors'"));
  map["lm_head.weight"] = "c.safetensors";
  write();
  EXPECT_THAT(import_error(scratch_ / "source"), HasSubstr("c.safetensors"));
}

TEST_F(Refusal, LeavesErniesMultiTokenPredictionOutOnlyWhenAskedTo) {
  LooseTensors tensors = read_loose(hf_fixture("ernie4_5_moe"));
  tensors["model.mtp_emb_norm.0.weight"] = tensors.at("model.norm.weight");
  write_model(scratch_ / "source", "ernie4_5_moe", tensors);
  EXPECT_THAT(import_error(scratch_ / "source"),
              AllOf(HasSubstr("--drop-mtp"), HasSubstr("model.mtp_emb_norm.0.weight")));
  const auto report = import_plain(scratch_ / "source", scratch_ / "own",
                                   [](ImportRequest& request) { request.drop_mtp = true; });
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("1 tensors of multi-token prediction")));
}

TEST_F(Refusal, TiedTablesMustBeEqualWhereBothAreStored) {
  LooseTensors tensors = read_loose(hf_fixture("qwen3"));
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  write_model(scratch_ / "source", "qwen3", tensors);
  import_plain(scratch_ / "source", scratch_ / "tied");
  export_plain(scratch_ / "tied", scratch_ / "back", read_hf_config(hf_fixture("qwen3")).model,
               DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "back"), tensors) << "stored again as it was";
  fs::remove_all(scratch_ / "source");
  EXPECT_THAT(import_changed(
                  [](LooseTensors& changed) {
                    changed["lm_head.weight"] = changed.at("model.embed_tokens.weight");
                    changed["lm_head.weight"].bytes[7] ^= std::byte{1};
                  },
                  "qwen3"),
              HasSubstr("lm_head.weight and model.embed_tokens.weight differ"));
}

TEST_F(Refusal, AnInterruptedConversionLeavesNothing) {
  const auto stop_at = [](int calls) {
    return [calls](ImportRequest& request) {
      request.options.progress = [left = calls](std::string_view, int64_t, int64_t) mutable {
        if (--left == 0) throw UserError("stopped");
      };
    };
  };
  for (const int calls : {1, 10, 60, 120}) {
    EXPECT_EQ(import_error(hf_fixture("mixtral"), stop_at(calls)), "stopped") << calls;
  }
}

TEST_F(Refusal, AnExistingTargetStays) {
  make_folder(scratch_ / "taken");
  write_file_synced(scratch_ / "taken/file", "precious");
  EXPECT_THAT(error_of([&] { import_plain(hf_fixture("llama"), scratch_ / "taken"); }),
              HasSubstr("exists already"));
  EXPECT_EQ(text_of(scratch_ / "taken/file"), "precious");
}

TEST_F(Refusal, ExportNamesWhatNoFamilyExpresses) {
  ModelConfig model = read_hf_config(hf_fixture("mixtral")).model;
  model.activation = Activation::kGelu;
  EXPECT_THAT(error_of([&] { find_family_for(model); }), HasSubstr("model.activation"));
  model = read_hf_config(hf_fixture("mixtral")).model;
  model.moe.inner_sizes = {48, 48, 48, 48, 48, 48, 48, 96};
  EXPECT_THAT(error_of([&] { find_family_for(model); }), HasSubstr("moe.inner_sizes"));
  model = read_hf_config(hf_fixture("mixtral")).model;
  model.moe.latent_size = 8;
  EXPECT_THAT(error_of([&] { find_family_for(model); }),
              HasSubstr("moe.latent_size: 8 here, 0 there"));
}

TEST_F(Refusal, ExportSplitsNoExpertsThatAreAlwaysFused) {
  import_plain(hf_fixture("gpt_oss"), scratch_ / "own");
  const ModelConfig model = read_hf_config(hf_fixture("gpt_oss")).model;
  const auto split = [](ExportRequest& request) { request.fused_experts = false; };
  EXPECT_THAT(error_of([&] {
                export_plain(scratch_ / "own", scratch_ / "back", model, DType::kF32, split);
              }),
              HasSubstr("leave --experts split out"));
}

TEST_F(Refusal, ExportRefusesAModelThatIsNotThatOfItsCompanions) {
  import_plain(hf_fixture("mixtral"), scratch_ / "own");
  ModelConfig model = read_hf_config(hf_fixture("mixtral")).model;
  model.norm_eps = 1e-3;
  EXPECT_THAT(
      error_of([&] { export_plain(scratch_ / "own", scratch_ / "back", model, DType::kF32); }),
      HasSubstr("model.norm_eps: 0.001 here, 1e-05 there"));
  EXPECT_FALSE(fs::exists(scratch_ / "back"));
}

TEST_F(Refusal, DamageIsFoundByVerification) {
  LooseTensors tensors = read_loose(hf_fixture("llama"));
  write_model(scratch_ / "source", "llama", tensors);
  // The source changes under the conversion, once writing is over.
  const auto damage = [&](ImportRequest& request) {
    request.options.progress = [&](std::string_view stage, int64_t, int64_t) {
      if (stage != "verifying" || tensors.empty()) return;
      tensors.clear();
      std::fstream file(scratch_ / "source/model.safetensors",
                        std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-5, std::ios::end);
      file.put('\x55');
    };
  };
  EXPECT_THAT(import_error(scratch_ / "source", damage), HasSubstr("verification failed"));
}

}  // namespace
}  // namespace tessera
