#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "hf/convert_testing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Prediction : public ConversionTest {};

TEST_F(Prediction, IsTakenInWithANote) {
  const auto report = import_plain(hf_fixture("deepseek_v3_mtp"), scratch_ / "own");
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("model.mtp_layers is 2")));
  ModelConfig model = fixture_config("deepseek_v3_mtp").model;
  EXPECT_TRUE(model.mtp_normed);
  const LooseTensors own = read_loose(scratch_ / "own/model-00000.safetensors");
  const LooseTensors given = read_loose(hf_fixture("deepseek_v3_mtp"));
  EXPECT_EQ(own.at("mtp_heads.1.norm.weight"), given.at("model.layers.3.shared_head.norm.weight"));
  EXPECT_EQ(own.at("mtp.1.hidden_norm.weight"), given.at("model.layers.3.hnorm.weight"));
  const auto floats = [](const LooseTensor& tensor) {
    std::vector<float> values(tensor.bytes.size() / sizeof(float));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
  };
  const auto joined = floats(given.at("model.layers.2.eh_proj.weight"));
  const auto embedding = floats(own.at("mtp.0.embed_proj.weight"));
  const auto hidden = floats(own.at("mtp.0.hidden_proj.weight"));
  const auto width = static_cast<size_t>(model.hidden_size);
  for (size_t i = 0; i < embedding.size(); ++i) {
    const size_t at = i / width * 2 * width + i % width;
    ASSERT_EQ(embedding[i], joined[at]) << i;
    ASSERT_EQ(hidden[i], joined[at + width]) << i;
  }
}

/// Of DeepSeek-V4, which has two projections and reads the streams before the head's norm.
TEST_F(Prediction, OfStreamsIsTakenIn) {
  const auto report = import_plain(hf_fixture("deepseek_v4_mtp"), scratch_ / "own");
  EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("model.mtp_layers is 2")));
  EXPECT_FALSE(fixture_config("deepseek_v4_mtp").model.mtp_normed);
  const LooseTensors own = read_loose(scratch_ / "own/model-00000.safetensors");
  const LooseTensors given = read_loose(hf_fixture("deepseek_v4_mtp"));
  for (const auto& [ours, theirs] :
       std::map<std::string, std::string>{{"mtp.1.embed_proj.weight", "mtp.1.e_proj.weight"},
                                          {"mtp.1.hidden_proj.weight", "mtp.1.h_proj.weight"},
                                          {"mtp.1.embed_norm.weight", "mtp.1.enorm.weight"},
                                          {"mtp_heads.1.norm.weight", "mtp.1.norm.weight"},
                                          {"mtp_heads.1.head_streams.weight", "mtp.1.hc_head_fn"}})
    EXPECT_EQ(own.at(ours), given.at(theirs)) << ours;
}

TEST_F(Prediction, IsLeftOutWhenAskedTo) {
  const auto report = import_plain(hf_fixture("glm4_moe_mtp"), scratch_ / "own",
                                   [](ImportRequest& request) { request.drop_mtp = true; });
  EXPECT_THAT(report.notes,
              ::testing::Contains(HasSubstr("tensors of multi-token prediction are")));
  export_plain(scratch_ / "own", scratch_ / "back",
               read_hf_config(hf_fixture("glm4_moe_mtp")).model, DType::kF32);
  LooseTensors plain = read_loose(hf_fixture("glm4_moe_mtp"));
  std::erase_if(plain,
                [](const auto& named) { return named.first.starts_with("model.layers.2."); });
  EXPECT_EQ(read_loose(scratch_ / "back"), plain);
}

/// Repeated tables must be the model's, and come back where they were.
TEST_F(Prediction, SharesTheModelsTables) {
  const std::string table = "model.layers.2.shared_head.head.weight";
  EXPECT_THAT(
      import_changed([&](LooseTensors& changed) { changed[table].bytes[7] ^= std::byte{1}; },
                     "glm4_moe_mtp"),
      AllOf(HasSubstr(table + " and lm_head.weight differ"), HasSubstr("--drop-mtp")));
  std::filesystem::remove_all(scratch_ / "source");
  LooseTensors tensors = read_loose(hf_fixture("glm4_moe_mtp"));
  tensors.erase(table);
  write_model(scratch_ / "source", "glm4_moe_mtp", tensors);
  import_plain(scratch_ / "source", scratch_ / "own");
  export_plain(scratch_ / "own", scratch_ / "back", fixture_config("glm4_moe_mtp").model,
               DType::kF32);
  EXPECT_EQ(read_loose(scratch_ / "back"), tensors);
}

TEST_F(Prediction, IsRefusedInPartAndWhereItIsUnknown) {
  EXPECT_THAT(import_changed([](LooseTensors& changed) { changed.erase("mtp.norm.weight"); },
                             "qwen3_next_mtp"),
              HasSubstr("missing (1): 'mtp.norm.weight'"));
  std::filesystem::remove_all(scratch_ / "source");
  EXPECT_THAT(import_changed([](LooseTensors& changed) { changed.erase("mtp.1.hc_head_base"); },
                             "deepseek_v4_mtp"),
              HasSubstr("missing (1): 'mtp.1.hc_head_base'"));
  std::filesystem::remove_all(scratch_ / "source");
  EXPECT_THAT(import_changed(
                  [](LooseTensors& changed) {
                    changed["model.layers.9.enorm.weight"] = changed.at("model.norm.weight");
                  },
                  "deepseek_v2"),
              AllOf(HasSubstr("1 tensors seem to be of multi-token prediction"),
                    HasSubstr("--drop-mtp"), HasSubstr("model.layers.9.enorm.weight")));
}

TEST_F(Prediction, IsExportedWhereTheFamilyHasIt) {
  import_plain(hf_fixture("deepseek_v3_mtp"), scratch_ / "own");
  ModelConfig model = fixture_config("deepseek_v3_mtp").model;
  model.mtp_normed = false;
  const auto left_out = export_plain(scratch_ / "own", scratch_ / "plain", model, DType::kF32);
  EXPECT_THAT(left_out.notes, ::testing::Contains(HasSubstr("read states before the final norm")));
  EXPECT_FALSE(read_loose(scratch_ / "plain").contains("model.layers.2.eh_proj.weight"));
  model.mtp_normed = true;
  model.mtp_layers = 1;
  export_plain(scratch_ / "own", scratch_ / "one", model, DType::kF32);
  EXPECT_TRUE(read_loose(scratch_ / "one").contains("model.layers.2.eh_proj.weight"));
  EXPECT_THAT(read_text_file(scratch_ / "one/config.json"),
              HasSubstr("\"num_nextn_predict_layers\": 1"));
}

}  // namespace
}  // namespace tessera
