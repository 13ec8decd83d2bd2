// DeepSeek-V4 as it is published: names without "model.", E4M3 matrices with E8M0 scales of blocks,
// experts of E2M1 pairs with E8M0 scales of 32 columns, the rest whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/fp8.h"
#include "core/random.h"
#include "hf/convert_testing.h"
#include "hf/tensors/packed_tensors.h"
#include "hf/tensors/tensor_map.h"
#include "hf/transfer/scaled_matrices.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr const char* kFixture = "deepseek_v4_mtp";
constexpr int64_t kPredictions = 2;
constexpr int64_t kBlock = 16;
constexpr int kBias = 127;

LooseTensor make_loose(DType dtype, const Shape& shape) {
  return {dtype, shape,
          std::vector<std::byte>(static_cast<size_t>(shape.num_elements() * dtype_size(dtype)))};
}

void set_float(LooseTensor& tensor, int64_t idx, float value) {
  std::memcpy(tensor.bytes.data() + idx * 4, &value, 4);
}

int draw(Random& random, int below) {
  return static_cast<int>(std::abs(random.next_normal()) * 1000) % below;
}

/// Codes, exponents, and what both stand for, worked out by hand from the formats.
struct Quantized {
  LooseTensor codes, scales, values;
};

/// E2M1: low halves first, an exponent for 32 columns of a row.
Quantized make_pairs(const Shape& shape, Random& random) {
  const int64_t cols = shape[1];
  Quantized result{make_loose(DType::kU8, {shape[0], cols / 2}),
                   make_loose(DType::kU8, {shape[0], cols / 32}), make_loose(DType::kF32, shape)};
  for (auto& byte : result.codes.bytes) byte = static_cast<std::byte>(draw(random, 256));
  for (auto& byte : result.scales.bytes) byte = static_cast<std::byte>(kBias - 5 + draw(random, 4));
  const float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const int byte = static_cast<int>(result.codes.bytes[i / 2]);
    const int code = i % 2 == 0 ? byte & 15 : byte >> 4;
    const int exponent = static_cast<int>(result.scales.bytes[i / 32]) - kBias;
    set_float(result.values, i,
              std::ldexp(code < 8 ? magnitudes[code] : -magnitudes[code - 8], exponent));
  }
  return result;
}

/// E4M3: an exponent for kBlock x kBlock.
Quantized make_e4m3(const Shape& shape, Random& random) {
  const int64_t cols = shape[1];
  const int64_t across = (cols + kBlock - 1) / kBlock;
  Quantized result{make_loose(DType::kE4M3, shape),
                   make_loose(DType::kU8, {(shape[0] + kBlock - 1) / kBlock, across}),
                   make_loose(DType::kF32, shape)};
  for (auto& byte : result.scales.bytes) byte = static_cast<std::byte>(kBias - 3 + draw(random, 4));
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const E4m3 number(static_cast<float>(random.next_normal()));
    const auto scale = result.scales.bytes[i / cols / kBlock * across + i % cols / kBlock];
    result.codes.bytes[i] = static_cast<std::byte>(number.bits);
    set_float(result.values, i,
              std::ldexp(static_cast<float>(number), static_cast<int>(scale) - kBias));
  }
  return result;
}

/// The parts of a published layer that are stored whole although they are matrices.
bool is_whole(const std::string& name) {
  for (const char* part :
       {"embed", "head.", ".gate.", ".ape", "hc_", "compressor.w", "weights_proj"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

std::string published_name(const std::string& saved) {
  if (saved == "model.embed_tokens.weight") return "embed.weight";
  std::string name = saved.starts_with("model.") ? saved.substr(6) : saved;
  constexpr std::string_view kNorm = ".attn.norm.weight";
  if (name.ends_with(kNorm)) name.replace(name.size() - kNorm.size(), 6, ".attn.kv_");
  return name.starts_with("hc_head.hc_") ? "hc_head_" + name.substr(11) : name;
}

class PublishedV4 : public ::testing::Test {
 protected:
  using Change = std::function<void(LooseTensors&, nlohmann::json&)>;

  /// Writes a model to "published" in few bits, and what that stands for to "whole", by the names
  /// that transformers saves.
  void write_both(const Change& change = {}) {
    auto config = nlohmann::json::parse(read_text_file(hf_fixture(kFixture) / "config.json"));
    config["moe_intermediate_size"] = 64;
    config["hidden_size"] = 32;
    write_folder("whole", whole_, config, {});
    config["expert_dtype"] = "fp4";
    config["quantization_config"] = {{"quant_method", "fp8"},
                                     {"fmt", "e4m3"},
                                     {"scale_fmt", "ue8m0"},
                                     {"activation_scheme", "dynamic"},
                                     {"weight_block_size", {kBlock, kBlock}}};
    write_folder("published", published_, config, change);
  }
  void expect_refusal(const Change& change, const std::string& message) {
    fs::remove_all(scratch_ / "published");
    fs::remove_all(scratch_ / "whole");
    write_both(change);
    EXPECT_THAT([&] { import_plain(scratch_ / "published", scratch_ / "own"); },
                ThrowsMessage<UserError>(HasSubstr(message)));
    EXPECT_FALSE(fs::exists(scratch_ / "own"));
  }
  static constexpr const char* kExpert = "layers.1.ffn.experts.2.w1";
  static constexpr const char* kMatrix = "layers.0.attn.wq_a";

  ScratchFolder scratch_;

 private:
  void write_folder(const char* name, LooseTensors& tensors, nlohmann::json& config,
                    const Change& change) {
    if (tensors.empty()) make_tensors(config);
    LooseTensors own = tensors;
    if (change) change(own, config);
    make_folder(scratch_ / name);
    write_loose(scratch_ / name / kHfWeightsFile, own);
    write_file_synced(scratch_ / name / "config.json", config.dump());
  }
  /// Of every tensor that the configuration has.
  void make_tensors(const nlohmann::json& config) {
    Random random(6, 2);
    ImportedConfig imported = parse_hf_config(config.dump(), "config.json");
    imported.model.mtp_layers = kPredictions;
    HfLayout layout{.vocab_size = imported.model.vocab_size};
    const TensorMap map = map_tensors(*imported.family, imported.model, DType::kF32, layout);
    for (const MappedTensor& tensor : map.hf) {
      LooseTensor& whole = whole_[tensor.name];
      const std::string published = published_name(tensor.name);
      if (tensor.is_whole_numbers) {
        whole = make_loose(DType::kI64, tensor.shape);
        for (int64_t i = 0; i < tensor.shape.num_elements(); ++i)
          whole.bytes[8 * i] = static_cast<std::byte>(i % 6);
      } else if (tensor.shape.rank() == 2 && !is_whole(published)) {
        const bool is_expert = published.find(".experts.") != std::string::npos;
        Quantized made =
            is_expert ? make_pairs(tensor.shape, random) : make_e4m3(tensor.shape, random);
        whole = made.values;
        published_[published] = std::move(made.codes);
        const size_t stem = published.size() - std::string("weight").size();
        published_[published.substr(0, stem) + "scale"] = std::move(made.scales);
        continue;
      } else {
        whole = make_loose(DType::kF32, tensor.shape);
        for (int64_t i = 0; i < tensor.shape.num_elements(); ++i)
          set_float(whole, i, static_cast<float>(random.next_normal()));
      }
      published_[published] = whole;
    }
  }

  LooseTensors published_, whole_;
};

TEST_F(PublishedV4, IsThatOfItsValues) {
  write_both();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string own(dtype_name(dtype));
    const auto choose = [&](ImportRequest& request) { request.options.dtype = dtype; };
    const auto report = import_plain(scratch_ / "published", scratch_ / ("few-" + own), choose);
    import_plain(scratch_ / "whole", scratch_ / ("whole-" + own), choose);
    const std::string file = "/model-00000.safetensors";
    EXPECT_EQ(read_loose(scratch_ / fmt::format("few-{}{}", own, file)),
              read_loose(scratch_ / fmt::format("whole-{}{}", own, file)));
    EXPECT_GT(report.num_verified, 0);
    // 4 layers, 2 of prediction: 5 of attention and 3 of the shared expert, an indexer, and 2 of
    // each prediction's joining; 3 of each of 6 experts.
    EXPECT_THAT(report.notes, Contains(HasSubstr("37 matrices of E4M3 numbers become")));
    EXPECT_THAT(report.notes, Contains(HasSubstr("72 matrices of E2M1 numbers become")));
    ModelConfig model = read_hf_config(scratch_ / "whole").model;
    model.mtp_layers = kPredictions;
    export_plain(scratch_ / ("few-" + own), scratch_ / ("back-" + own), model, dtype);
    const auto back = read_loose(scratch_ / ("back-" + own));
    for (const auto& [name, tensor] : read_loose(scratch_ / "whole")) {
      if (name.find(".experts.") == std::string::npos) continue;
      EXPECT_EQ(convert_loose(back.at(name), DType::kF32), tensor) << name << " is exact";
    }
    const std::string config = read_text_file(scratch_ / fmt::format("back-{}/config.json", own));
    EXPECT_THAT(config, Not(HasSubstr("quantization_config")));
    EXPECT_THAT(config, Not(HasSubstr("expert_dtype")));
  }
}

/// DeepSeek-V4-Flash-Base has the exponents as F32 numbers.
TEST_F(PublishedV4, TakesPowersOfTwoInF32) {
  const auto import_scales = [&](bool in_f32) {
    fs::remove_all(scratch_ / "published");
    fs::remove_all(scratch_ / "whole");
    write_both([&](LooseTensors& tensors, nlohmann::json&) {
      for (auto& [name, tensor] : tensors) {
        if (!in_f32 || !name.ends_with(".scale")) continue;
        LooseTensor numbers = make_loose(DType::kF32, tensor.shape);
        for (int64_t i = 0; i < tensor.shape.num_elements(); ++i)
          set_float(numbers, i, std::ldexp(1.0F, static_cast<int>(tensor.bytes[i]) - kBias));
        tensor = numbers;
      }
    });
    const std::string own = in_f32 ? "own-f32" : "own";
    import_plain(scratch_ / "published", scratch_ / own);
    return read_loose(scratch_ / (own + "/model-00000.safetensors"));
  };
  EXPECT_EQ(import_scales(true), import_scales(false));
}

TEST_F(PublishedV4, NamesWhatIsWrong) {
  const std::string expert = kExpert;
  const std::string matrix = kMatrix;
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { t.erase(expert + ".scale"); },
                 "is of pairs of E2M1 numbers, but its scales");
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) {
        t[expert + ".scale"] = make_loose(DType::kU8, {4, 2});
      },
      "blocks of 1 x 32 of [64, 32] have f32, bf16, f16 or E8M0 [64, 1]");
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { t.erase(matrix + ".scale"); },
                 "is of type e4m3, but its scales");
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) {
        t[expert + ".weight"] = make_loose(DType::kU8, {64, 32});
      },
      "weights must be F32, BF16 or F16, or E4M3 or pairs of E2M1 numbers with scales");
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) {
        t[expert + ".weight"] = make_loose(DType::kU8, {64, 8});
      },
      "of another shape");
  expect_refusal([](LooseTensors&, nlohmann::json& c) { c.erase("quantization_config"); },
                 "has no 'quantization_config'");
  expect_refusal([](LooseTensors&, nlohmann::json& c) { c["expert_dtype"] = "int4"; },
                 "'expert_dtype' is");
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) { t[expert + ".scale"].bytes[3] = std::byte{255}; },
      "--allow-nonfinite");
}

}  // namespace
}  // namespace tessera
