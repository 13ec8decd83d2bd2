// Models whose matrices are E4M3 numbers with scales of blocks.
#include "hf/transfer/scaled_matrices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/fp8.h"
#include "hf/convert_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr int64_t kRows = 16;
constexpr int64_t kCols = 24;

float float_at(const LooseTensor& tensor, int64_t idx) {
  float value = 0;
  std::memcpy(&value, tensor.bytes.data() + idx * 4, 4);
  return value;
}

void set_float(LooseTensor& tensor, int64_t idx, float value) {
  std::memcpy(tensor.bytes.data() + idx * 4, &value, 4);
}

LooseTensor make_loose(DType dtype, const Shape& shape) {
  return {dtype, shape,
          std::vector<std::byte>(static_cast<size_t>(shape.num_elements() * dtype_size(dtype)))};
}

/// A matrix in E4M3, its scales, and what both stand for.
struct ScaledLoose {
  LooseTensor codes, scales, values;
};

ScaledLoose scale_matrix(const LooseTensor& matrix) {
  const int64_t rows = matrix.shape[0];
  const int64_t cols = matrix.shape[1];
  const int64_t across = (cols + kCols - 1) / kCols;
  const Shape blocks{(rows + kRows - 1) / kRows, across};
  ScaledLoose result{make_loose(DType::kE4M3, matrix.shape), make_loose(DType::kF32, blocks),
                     make_loose(DType::kF32, matrix.shape)};
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t block = i / cols / kRows * across + i % cols / kCols;
    const float amax = std::max(float_at(result.scales, block), std::abs(float_at(matrix, i)));
    set_float(result.scales, block, amax);
  }
  for (int64_t block = 0; block < blocks.num_elements(); ++block)
    set_float(result.scales, block, float_at(result.scales, block) / kLargestE4m3);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float scale = float_at(result.scales, i / cols / kRows * across + i % cols / kCols);
    const E4m3 number(float_at(matrix, i) / scale);
    result.codes.bytes[i] = static_cast<std::byte>(number.bits);
    set_float(result.values, i, static_cast<float>(number) * scale);
  }
  return result;
}

class ScaledModel : public ::testing::TestWithParam<std::string> {
 protected:
  /// Writes the fixture as E4M3 numbers to "scaled", and what they stand for to "whole".
  void write_both(const std::function<void(LooseTensors&, nlohmann::json&)>& change = {}) {
    LooseTensors scaled;
    LooseTensors whole;
    for (const auto& [name, tensor] : read_loose(hf_fixture(GetParam()))) {
      const bool plain = tensor.shape.rank() != 2 || name.find("embed") != std::string::npos ||
                         name.find("lm_head") != std::string::npos ||
                         name.find(".gate.") != std::string::npos;
      if (plain) {
        scaled[name] = whole[name] = tensor;
        continue;
      }
      ScaledLoose matrix = scale_matrix(tensor);
      scaled[name] = std::move(matrix.codes);
      scaled[name + "_scale_inv"] = std::move(matrix.scales);
      whole[name] = std::move(matrix.values);
    }
    auto config = nlohmann::json::parse(read_text_file(hf_fixture(GetParam()) / "config.json"));
    config["quantization_config"] = {{"quant_method", "fp8"},
                                     {"fmt", "e4m3"},
                                     {"activation_scheme", "dynamic"},
                                     {"weight_block_size", {kRows, kCols}}};
    if (change) change(scaled, config);
    make_folder(scratch_ / "scaled");
    write_loose(scratch_ / "scaled" / kHfWeightsFile, scaled);
    write_file_synced(scratch_ / "scaled/config.json", config.dump());
    write_model(scratch_ / "whole", GetParam(), whole);
  }
  ModelConfig model() const { return fixture_config(GetParam()).model; }

  ScratchFolder scratch_;
};

TEST_P(ScaledModel, IsThatOfItsValues) {
  write_both();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string own(dtype_name(dtype));
    const auto choose = [&](ImportRequest& request) { request.options.dtype = dtype; };
    const auto report = import_plain(scratch_ / "scaled", scratch_ / ("scaled-" + own), choose);
    import_plain(scratch_ / "whole", scratch_ / ("whole-" + own), choose);
    const std::string file = "/model-00000.safetensors";
    EXPECT_EQ(read_loose(scratch_ / fmt::format("scaled-{}{}", own, file)),
              read_loose(scratch_ / fmt::format("whole-{}{}", own, file)));
    EXPECT_GT(report.num_verified, 0);
    EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("matrices of E4M3 numbers become")));
    export_plain(scratch_ / ("scaled-" + own), scratch_ / ("scaled-back-" + own), model(), dtype);
    export_plain(scratch_ / ("whole-" + own), scratch_ / ("whole-back-" + own), model(), dtype);
    const auto back = read_loose(scratch_ / ("scaled-back-" + own));
    for (const auto& [name, tensor] : read_loose(scratch_ / ("whole-back-" + own)))
      EXPECT_EQ(convert_loose(back.at(name), DType::kF32), convert_loose(tensor, DType::kF32))
          << name;
    EXPECT_THAT(read_text_file(scratch_ / ("scaled-back-" + own + "/config.json")),
                Not(HasSubstr("quantization_config")));
  }
}

/// The scales that BF16 holds, in either type, give the same model.
TEST_P(ScaledModel, TakesScalesInBf16) {
  const auto import_scales = [&](DType dtype) {
    fs::remove_all(scratch_ / "scaled");
    fs::remove_all(scratch_ / "whole");
    write_both([dtype](LooseTensors& tensors, nlohmann::json&) {
      for (auto& [name, tensor] : tensors) {
        if (!name.ends_with("_scale_inv")) continue;
        tensor = convert_loose(convert_loose(tensor, DType::kBF16), dtype);
      }
    });
    const std::string own(dtype_name(dtype));
    import_plain(scratch_ / "scaled", scratch_ / own);
    return read_loose(scratch_ / (own + "/model-00000.safetensors"));
  };
  EXPECT_EQ(import_scales(DType::kBF16), import_scales(DType::kF32));
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ScaledModel, ::testing::Values("deepseek_v3", "qwen3_moe"),
                         [](const auto& info) { return info.param; });

class ScaledRefusal : public ScaledModel {
 protected:
  void expect_refusal(const std::function<void(LooseTensors&, nlohmann::json&)>& change,
                      const std::string& message) {
    fs::remove_all(scratch_ / "scaled");
    fs::remove_all(scratch_ / "whole");
    write_both(change);
    EXPECT_THAT([&] { import_plain(scratch_ / "scaled", scratch_ / "own"); },
                ThrowsMessage<UserError>(HasSubstr(message)));
    EXPECT_FALSE(fs::exists(scratch_ / "own"));
  }
};

TEST_P(ScaledRefusal, NamesWhatIsWrong) {
  const std::string matrix = "model.layers.0.self_attn.o_proj.weight";
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { t.erase(matrix + "_scale_inv"); },
                 "its scales " + matrix + "_scale_inv are missing");
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) {
        t[matrix + "_scale_inv"] = make_loose(DType::kF32, {1, 1});
      },
      "blocks of 16 x 24 of");
  expect_refusal([](LooseTensors&, nlohmann::json& c) { c.erase("quantization_config"); },
                 "has no 'quantization_config'");
  expect_refusal(
      [](LooseTensors&, nlohmann::json& c) { c["quantization_config"]["quant_method"] = "gptq"; },
      "has quant_method \"gptq\"");
  expect_refusal([](LooseTensors&, nlohmann::json& c) { c["quantization_config"]["fmt"] = "e5m2"; },
                 "has fmt = '\"e5m2\"'");
  expect_refusal(
      [](LooseTensors&, nlohmann::json& c) {
        c["quantization_config"]["weight_block_sizes"] = {16, 24};
      },
      "did you mean 'weight_block_size'");
  expect_refusal(
      [](LooseTensors&, nlohmann::json& c) { c["quantization_config"].erase("weight_block_size"); },
      "expected two sizes");
  expect_refusal(
      [](LooseTensors&, nlohmann::json& c) {
        c["quantization_config"]["weight_block_size"] = {0, 128};
      },
      "not from 1 to");
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) {
        t["model.norm.weight"] = make_loose(DType::kE4M3, t["model.norm.weight"].shape);
      },
      "only matrices may have block scales");
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { t[matrix].bytes[0] = std::byte{0x7f}; },
                 "--allow-nonfinite");
}

INSTANTIATE_TEST_SUITE_P(Fixture, ScaledRefusal, ::testing::Values("deepseek_v3"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tessera
