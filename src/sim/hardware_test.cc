#include "sim/hardware.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kRates =
    "name = \"small\"\n[device]\nkind = \"cpu\"\nf32_tflops = 1\nbf16_tflops = 2\n"
    "memory_gbs = 20\nmemory = \"1GiB\"\n[node]\ndevices = 2\nmemory = \"4GiB\"\n[link]\nnode_gbs "
    "= 4\n"
    "network_gbs = 1\n";

class HardwareFile : public ::testing::Test {
 protected:
  ~HardwareFile() override { std::filesystem::remove(path_); }
  std::string write(const std::string& text) const {
    std::ofstream(path()) << text;
    return path();
  }
  const std::string& path() const { return path_; }
  /// What loading a file of that text throws.
  std::string refusal(const std::string& text) const { return refusal_of(write(text)); }
  static std::string refusal_of(const std::string& name) {
    try {
      load_hardware(name);
      return "";
    } catch (const UserError& error) {
      return error.what();
    }
  }

 private:
  std::string path_ = ::testing::TempDir() + unique_name("hardware-") + "machine.toml";
};

TEST_F(HardwareFile, ComesWithTheProgram) {
  EXPECT_THAT(hardware_names(), ::testing::IsSupersetOf({"h100-ib", "h200-ib", "h800-ib"}));
  for (const std::string& name : hardware_names()) {
    SCOPED_TRACE(name);
    const Hardware hardware = load_hardware(name);
    EXPECT_EQ(hardware.name, name);
    EXPECT_THAT(hardware.source, Not(IsEmpty()));
    EXPECT_GT(hardware.memory_bytes(), 0);
    EXPECT_GE(hardware.bf16_tflops, hardware.f32_tflops);
  }
}

TEST_F(HardwareFile, IsReadAsItIsWritten) {
  Hardware hardware = load_hardware(write(kRates));
  hardware.measured = {format_sample({"linear", "bf16", 2e9, 3e6, 1.5e-3}),
                       format_sample({"rmsnorm", "f32", 0, 4096, 2e-6})};
  hardware.gap_microseconds = 2.5;
  const Hardware again = load_hardware(write(write_hardware(hardware)));
  EXPECT_EQ(write_hardware(again), write_hardware(hardware));
  ASSERT_EQ(again.samples().size(), 2);
  EXPECT_EQ(again.samples()[0].name, "linear");
  EXPECT_EQ(again.samples()[0].seconds, 1.5e-3);
  EXPECT_EQ(again.samples()[1].flops, 0);
}

TEST_F(HardwareFile, ThatLacksARateIsRefused) {
  for (const char* key : {"f32_tflops", "bf16_tflops", "memory_gbs", "node_gbs", "network_gbs"}) {
    std::string text = kRates;
    const size_t at = text.find(key);
    text.erase(at, text.find('\n', at) - at);
    EXPECT_THAT(refusal(text), AllOf(HasSubstr("machine.toml"), HasSubstr(key),
                                     HasSubstr("is missing; it must be above 0")));
  }
  std::string text = kRates;
  text.replace(text.find("memory = \"4GiB\""), 15, "");
  EXPECT_THAT(refusal(text), HasSubstr("node.memory is missing"));
}

TEST_F(HardwareFile, OfOtherContentsIsRefused) {
  EXPECT_THAT(refusal(std::string(kRates) + "network_gb = 1\n"), HasSubstr("link.network_gbs"));
  EXPECT_THAT(refusal_of("h100-bi"), HasSubstr("did you mean 'h100-ib'"));
  const auto with_kernels = [&](const std::string& line) {
    return refusal(std::string(kRates) + "[kernels]\n" + line + "\n");
  };
  EXPECT_THAT(with_kernels("like = \"h100\""),
              AllOf(HasSubstr("kernels.like is 'h100'"), HasSubstr("h100-ib")));
  EXPECT_THAT(with_kernels("like = \"h100-ib\"\nmeasured = [\"linear bf16 1 1 1\"]"),
              HasSubstr("exclude each other"));
  for (const char* sample :
       {"linear bf16 1 1", "linear bf16 1 1 0", "linear bf16 -1 1 1", "linear bf16 1 1 1 1", ""})
    EXPECT_THAT(with_kernels(fmt::format("measured = [\"{}\"]", sample)),
                AllOf(HasSubstr("kernels.measured"), HasSubstr(fmt::format("\"{}\"", sample))));
}

TEST_F(HardwareFile, OfUnknownOperatorsIsRefused) {
  const auto with_samples = [&](const std::string& samples) {
    return refusal(fmt::format("{}[kernels]\nmeasured = [{}]\n", kRates, samples));
  };
  EXPECT_THAT(
      with_samples("\"linear bf16 1 1 1\", \"foo bf16 0 1 1\""),
      AllOf(HasSubstr("machine.toml: line 2 of kernels.measured is \"foo bf16 0 1 1\""),
            HasSubstr("found \"foo\", which is no operator"), HasSubstr("leave the line out")));
  EXPECT_THAT(with_samples("\"atention bf16 0 1 1\""), HasSubstr("did you mean 'attention'?"));
  // What only GPUs, or only ranks beside others, run.
  for (const char* name : {"joined_linear", "activated_product", "all_to_all_v_on_device",
                           "dispatch_plan_on_device", "scaled_grouped_wgrad"})
    EXPECT_EQ(with_samples(fmt::format("\"{} bf16 0 1 1\"", name)), "") << name;
}

TEST(Hardware, KernelsReachSharesOfItsOwn) {
  Hardware hardware{.f32_tflops = 2,
                    .bf16_tflops = 10,
                    .fp8_tflops = 20,
                    .memory_gbs = 100,
                    .reach = {.bf16 = 0.5, .fp8 = 1.5, .memory = 0.8}};
  EXPECT_DOUBLE_EQ(hardware.matrix_rate("f32"), 2e12);
  EXPECT_DOUBLE_EQ(hardware.matrix_rate("bf16"), 5e12);
  EXPECT_DOUBLE_EQ(hardware.matrix_rate("e4m3 x rows"), 3e13);
  EXPECT_DOUBLE_EQ(hardware.memory_rate(), 8e10);
  hardware.fp8_tflops = 0;  // products of FP8 are then those of BF16
  EXPECT_DOUBLE_EQ(hardware.matrix_rate("e4m3 x rows"), 5e12);
}

}  // namespace
}  // namespace tessera
