// Models whose experts are stored as MXFP4.
#include "hf/tensors/packed_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/random.h"
#include "hf/convert_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

LooseTensor make_loose(DType dtype, const Shape& shape) {
  return {dtype, shape,
          std::vector<std::byte>(static_cast<size_t>(shape.num_elements() * dtype_size(dtype)))};
}

void set_byte(LooseTensor& tensor, int64_t at, int value) {
  tensor.bytes[at] = static_cast<std::byte>(value);
}

std::vector<float> read_all(LooseTensors& tensors, const fs::path& folder, const Shape& shape) {
  make_folder(folder);
  write_loose(folder / kHfWeightsFile, tensors);
  const HfTensors files(folder);
  const PackedTensor packed = *find_packed(files, "w");
  check_packed(packed, "w", shape);
  std::vector<float> values(shape.num_elements());
  read_packed(packed, 0, values);
  // Any rows alone are the same.
  const int64_t cols = shape[2];
  for (int64_t row = 0; row < shape[0] * shape[1]; row += 7) {
    std::vector<float> part(cols * std::min<int64_t>(3, shape[0] * shape[1] - row));
    read_packed(packed, row * cols, part);
    for (size_t i = 0; i < part.size(); ++i)
      EXPECT_EQ(std::isnan(part[i]) ? -77.0F : part[i],
                std::isnan(values[row * cols + i]) ? -77.0F : values[row * cols + i]);
  }
  return values;
}

/// Every code by hand: [1, 32, 2], whose first column has all codes twice at the scale 2^0, and the
/// second one 1.0, then 6.0, at 2^-3.
TEST(PackedTensor, DecodesEveryNumber) {
  const ScratchFolder scratch;
  LooseTensors tensors = {{"w_blocks", make_loose(DType::kU8, {1, 2, 1, 16})},
                          {"w_scales", make_loose(DType::kU8, {1, 2, 1})}};
  LooseTensor& blocks = tensors.at("w_blocks");
  for (int byte = 0; byte < 16; ++byte) {
    set_byte(blocks, byte, (2 * byte % 16) | (2 * byte + 1) % 16 << 4);
    set_byte(blocks, 16 + byte, 0x72);
  }
  set_byte(tensors.at("w_scales"), 0, 127);
  set_byte(tensors.at("w_scales"), 1, 124);
  const std::vector<float> values = read_all(tensors, scratch / "w", {1, 32, 2});
  const std::vector<float> expected = {0,     0.5F,  1,  1.5F,  2,  3,  4,  6,
                                       -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};
  for (int k = 0; k < 32; ++k) {
    EXPECT_EQ(values[2 * k], expected[k % 16]) << k;
    EXPECT_EQ(std::signbit(values[2 * k]), k % 16 >= 8) << k;
    EXPECT_EQ(values[2 * k + 1], k % 2 == 0 ? 0.125F : 0.75F) << k;
  }
}

TEST(PackedTensor, DecodesEveryScale) {
  const ScratchFolder scratch;
  LooseTensors tensors = {{"w_blocks", make_loose(DType::kU8, {1, 256, 1, 16})},
                          {"w_scales", make_loose(DType::kU8, {1, 256, 1})}};
  for (int n = 0; n < 256; ++n) {
    for (int byte = 0; byte < 16; ++byte) set_byte(tensors.at("w_blocks"), n * 16 + byte, 0x33);
    set_byte(tensors.at("w_scales"), n, n);
  }
  const std::vector<float> values = read_all(tensors, scratch / "w", {1, 32, 256});
  for (int n = 0; n < 255; ++n) EXPECT_EQ(values[n], std::ldexp(1.5F, n - 127)) << n;
  EXPECT_TRUE(std::isnan(values[255]));
}

/// Experts, groups and rows, each number told apart from its place.
TEST(PackedTensor, FindsEveryPlace) {
  const ScratchFolder scratch;
  const Shape shape{3, 96, 21};
  LooseTensors tensors = {{"w_blocks", make_loose(DType::kU8, {3, 21, 3, 16})},
                          {"w_scales", make_loose(DType::kU8, {3, 21, 3})}};
  const auto code = [](int64_t e, int64_t k, int64_t n) { return (e * 5 + k * 3 + n * 7) % 16; };
  const auto scale = [](int64_t e, int64_t g, int64_t n) { return 120 + (e + 2 * g + n) % 13; };
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t n = 0; n < 21; ++n) {
      for (int64_t g = 0; g < 3; ++g) {
        const int64_t at = (e * 21 + n) * 3 + g;
        set_byte(tensors.at("w_scales"), at, static_cast<int>(scale(e, g, n)));
        for (int64_t byte = 0; byte < 16; ++byte) {
          const int64_t k = g * 32 + 2 * byte;
          set_byte(tensors.at("w_blocks"), at * 16 + byte,
                   static_cast<int>(code(e, k, n) | code(e, k + 1, n) << 4));
        }
      }
    }
  }
  const float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const std::vector<float> values = read_all(tensors, scratch / "w", shape);
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t k = 0; k < 96; ++k) {
      for (int64_t n = 0; n < 21; ++n) {
        const int64_t c = code(e, k, n);
        const float sign = c < 8 ? 1.0F : -1.0F;
        const float expected = sign * magnitudes[c % 8] *
                               std::ldexp(1.0F, static_cast<int>(scale(e, k / 32, n)) - 127);
        ASSERT_EQ(values[(e * 96 + k) * 21 + n], expected) << e << " " << k << " " << n;
      }
    }
  }
}

/// The fixture of gpt-oss with its experts packed, and what they then stand for.
class PackedModel : public ::testing::Test {
 protected:
  void write_both(const std::function<void(LooseTensors&, nlohmann::json&)>& change = {}) {
    LooseTensors packed;
    LooseTensors whole;
    Random random(4, 4);
    for (const auto& [name, tensor] : read_loose(hf_fixture("gpt_oss"))) {
      if (!name.ends_with("experts.gate_up_proj") && !name.ends_with("experts.down_proj")) {
        packed[name] = whole[name] = tensor;
        continue;
      }
      pack(name, tensor.shape, random, packed, whole);
    }
    auto config = nlohmann::json::parse(read_text_file(hf_fixture("gpt_oss") / "config.json"));
    config["quantization_config"] = {{"quant_method", "mxfp4"},
                                     {"modules_to_not_convert", {"lm_head"}}};
    if (change) change(packed, config);
    make_folder(scratch_ / "packed");
    write_loose(scratch_ / "packed" / kHfWeightsFile, packed);
    write_file_synced(scratch_ / "packed/config.json", config.dump());
    write_model(scratch_ / "whole", "gpt_oss", whole);
  }
  void expect_refusal(const std::function<void(LooseTensors&, nlohmann::json&)>& change,
                      const std::string& message) {
    fs::remove_all(scratch_ / "packed");
    fs::remove_all(scratch_ / "whole");
    write_both(change);
    EXPECT_THAT([&] { import_plain(scratch_ / "packed", scratch_ / "own"); },
                ThrowsMessage<UserError>(HasSubstr(message)));
    EXPECT_FALSE(fs::exists(scratch_ / "own"));
  }

  ScratchFolder scratch_;

 private:
  /// Random codes for a tensor [E, K, N], and their values.
  static void pack(const std::string& name, const Shape& shape, Random& random,
                   LooseTensors& packed, LooseTensors& whole) {
    const Shape scale_shape{shape[0], shape[2], shape[1] / 32};
    LooseTensor blocks =
        make_loose(DType::kU8, {scale_shape[0], scale_shape[1], scale_shape[2], 16});
    LooseTensor scales = make_loose(DType::kU8, scale_shape);
    LooseTensor values = make_loose(DType::kF32, shape);
    const auto draw = [&](int below) {
      return static_cast<int>(std::abs(random.next_normal()) * 1000) % below;
    };
    for (auto& byte : blocks.bytes) byte = static_cast<std::byte>(draw(256));
    for (auto& byte : scales.bytes) byte = static_cast<std::byte>(122 + draw(4));
    const float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    for (int64_t i = 0; i < shape.num_elements(); ++i) {
      const int64_t n = i % shape[2];
      const int64_t k = i / shape[2] % shape[1];
      const int64_t row = (i / shape[2] / shape[1] * shape[2] + n) * shape[1];
      const int byte = static_cast<int>(blocks.bytes[(row + k) / 2]);
      const int code = k % 2 == 0 ? byte & 15 : byte >> 4;
      const int exponent = static_cast<int>(scales.bytes[(row + k) / 32]) - 127;
      const float value = std::ldexp(code < 8 ? magnitudes[code] : -magnitudes[code - 8], exponent);
      std::memcpy(values.bytes.data() + i * 4, &value, 4);
    }
    packed[name + "_blocks"] = std::move(blocks);
    packed[name + "_scales"] = std::move(scales);
    whole[name] = std::move(values);
  }
};

TEST_F(PackedModel, IsThatOfItsValues) {
  write_both();
  const ModelConfig model = read_hf_config(hf_fixture("gpt_oss")).model;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string own(dtype_name(dtype));
    const auto choose = [&](ImportRequest& request) { request.options.dtype = dtype; };
    const auto report = import_plain(scratch_ / "packed", scratch_ / ("packed-" + own), choose);
    import_plain(scratch_ / "whole", scratch_ / ("whole-" + own), choose);
    const std::string file = "/model-00000.safetensors";
    EXPECT_EQ(read_loose(scratch_ / fmt::format("packed-{}{}", own, file)),
              read_loose(scratch_ / fmt::format("whole-{}{}", own, file)));
    EXPECT_GT(report.num_verified, 0);
    EXPECT_THAT(report.notes, ::testing::Contains(HasSubstr("4 tensors of MXFP4 numbers become")));
    export_plain(scratch_ / ("packed-" + own), scratch_ / ("packed-back-" + own), model, dtype);
    const auto back = read_loose(scratch_ / ("packed-back-" + own));
    for (const auto& [name, tensor] : read_loose(scratch_ / "whole")) {
      if (!name.ends_with("_proj")) continue;
      EXPECT_EQ(convert_loose(back.at(name), DType::kF32), tensor) << name << " is exact";
    }
    EXPECT_THAT(read_text_file(scratch_ / fmt::format("packed-back-{}/config.json", own)),
                Not(HasSubstr("quantization_config")));
  }
}

TEST_F(PackedModel, NamesWhatIsWrong) {
  const std::string down = "model.layers.0.mlp.experts.down_proj";
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { t.erase(down + "_scales"); },
                 fmt::format("its scales '{}_scales' are missing", down));
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { t.erase(down + "_blocks"); }, down);
  expect_refusal(
      [&](LooseTensors& t, nlohmann::json&) {
        t[down + "_scales"] = make_loose(DType::kU8, {6, 32, 2});
      },
      "have u8 [6, 32, 1]");
  expect_refusal([](LooseTensors&, nlohmann::json& c) { c.erase("quantization_config"); },
                 "has MXFP4 numbers, and only a folder whose config.json says so");
  expect_refusal(
      [](LooseTensors&, nlohmann::json& c) { c["quantization_config"]["block_size"] = 32; },
      "has the key 'block_size', which is unknown");
  expect_refusal([&](LooseTensors& t, nlohmann::json&) { set_byte(t[down + "_scales"], 0, 255); },
                 "--allow-nonfinite");
}

}  // namespace
}  // namespace tessera
