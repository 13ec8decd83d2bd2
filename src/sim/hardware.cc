#include "sim/hardware.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/config/byte_size.h"
#include "core/text/names.h"
#include "ops/registry/operator_names.h"
#include "sim/hardware_texts.h"
#include "sim/units.h"

namespace tessera {
namespace {

constexpr double kTera = 1e12;

KernelSample parse_sample(const std::string& text, const std::string& hardware) {
  std::istringstream in(text);
  KernelSample sample;
  std::string rest;
  in >> sample.name >> sample.format >> sample.flops >> sample.bytes >> sample.seconds;
  const bool whole = !in.fail() && !(in >> rest);
  if (!whole || sample.flops < 0 || sample.bytes < 0 || sample.seconds <= 0) {
    user_error(
        "hardware {}: kernels.measured has \"{}\"; expected \"operator format FLOPs bytes "
        "seconds\", such as \"linear bf16 1.1e+12 3.3e+08 0.0017\"",
        hardware, text);
  }
  return sample;
}

/// A sample of an unknown operator would be one that nothing ever uses.
void require_known_operators(const Hardware& hardware, const std::string& where) {
  std::set<std::string> known;
  const std::vector<KernelSample> samples = hardware.samples();
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::string& name = samples[i].name;
    if (!known.insert(name).second) continue;
    const std::string judged = judge_operator_name(name);
    require(judged.empty(),
            "{}: line {} of kernels.measured is \"{}\"; found \"{}\"{}; write the name of one, or "
            "leave the line out",
            where, i + 1, hardware.measured[i], name, judged);
  }
}

void require_rates(const Hardware& hardware, const std::string& where) {
  const auto need = [&](double value, const char* key) {
    require(value > 0, "{}: {} is missing; it must be above 0", where, key);
  };
  need(hardware.f32_tflops, "device.f32_tflops");
  need(hardware.bf16_tflops, "device.bf16_tflops");
  need(hardware.memory_gbs, "device.memory_gbs");
  if (hardware.node_devices > 1) need(hardware.node.gbs, "link.node_gbs");
  need(hardware.network.gbs, "link.network_gbs");
  for (const auto& [key, text] : {std::pair("device.memory", hardware.memory),
                                  std::pair("node.memory", hardware.host_memory)}) {
    require(!text.empty(), "{}: {} is missing; give a size such as \"80GiB\"", where, key);
    parse_byte_size(key, text);
  }
  require_known_operators(hardware, where);
}

}  // namespace

int64_t Hardware::memory_bytes() const {
  return parse_byte_size("device.memory", memory);
}
int64_t Hardware::host_memory_bytes() const {
  return parse_byte_size("node.memory", host_memory);
}

double Hardware::matrix_rate(std::string_view format) const {
  const bool is_fp8 = format.starts_with("e4m3") || format.starts_with("e5m2");
  if (is_fp8 && fp8_tflops > 0) return reach.fp8 * fp8_tflops * kTera;
  if (is_fp8 || format.starts_with("bf16") || format.starts_with("f16"))
    return reach.bf16 * bf16_tflops * kTera;
  return f32_tflops * kTera;
}

double Hardware::memory_rate() const {
  return reach.memory * memory_gbs * kGiga;
}

std::vector<KernelSample> Hardware::samples() const {
  std::vector<KernelSample> all;
  for (const std::string& text : measured) all.push_back(parse_sample(text, name));
  return all;
}

std::string format_sample(const KernelSample& sample) {
  return fmt::format("{} {} {:.4g} {:.4g} {:.4g}", sample.name, sample.format, sample.flops,
                     sample.bytes, sample.seconds);
}

ConfigSchema make_hardware_schema(Hardware& h) {
  constexpr double kMostDevices = 4096;
  const Range rate = at_least(0);
  ConfigSchema schema;
  schema.add("name", &h.name, "What the hardware is called");
  schema.add("source", &h.source, "Where the figures come from");
  schema.add_enum("device.kind", &h.on_host, {{"cuda", false}, {"cpu", true}},
                  "Whose kernels run on it");
  schema.add("device.f32_tflops", &h.f32_tflops, "Most of matrix products in F32", rate);
  schema.add("device.bf16_tflops", &h.bf16_tflops, "Most of matrix products in BF16", rate);
  schema.add("device.fp8_tflops", &h.fp8_tflops, "Most of matrix products in FP8; 0: it has none",
             rate);
  schema.add("device.memory_gbs", &h.memory_gbs, "GB/s read and written together", rate);
  schema.add("device.memory", &h.memory, "Memory of a device that training may take: \"80GiB\"");
  schema.add("node.devices", &h.node_devices, "Devices of a node", between(1, kMostDevices));
  schema.add("node.processors", &h.node_processors,
             "Processors that a node's devices share, each on one at a time, where they are CPU "
             "ranks; 0: each has its own",
             between(0, kMostDevices));
  schema.add("node.memory", &h.host_memory, "Memory of a node's host");
  schema.add("node.host_gbs", &h.host_gbs, "GB/s between a device and the host, each way",
             above(0));
  schema.add("node.host_update_gbs", &h.host_update_gbs,
             "GB/s of a node's memory, read and written together, where the host's threads update "
             "the optimizer's state (optim.update = \"host\"), for all devices together",
             above(0));
  schema.add("link.node_us", &h.node.microseconds,
             "Microseconds of an exchange in a node beside its bytes, a doubling of ranks", rate);
  schema.add("link.node_gbs", &h.node.gbs, "GB/s that a device sends within a node", rate);
  schema.add("link.network_us", &h.network.microseconds, "The same between nodes", rate);
  schema.add("link.network_gbs", &h.network.gbs, "GB/s that a device sends between nodes", rate);
  schema.add("link.exchange_share", &h.exchange_share,
             "Share of a device that an exchange takes from computation", between(0, 1));
  schema.add("kernels.like", &h.like,
             "Hardware whose kernels are taken to reach the same shares of the rates");
  constexpr double kFar = 10;
  const Range ratio = between(1 / kFar, kFar);
  schema.add("kernels.reach_bf16", &h.reach.bf16,
             "What products reach of device.bf16_tflops, over what the same ones reach of it on "
             "the hardware of kernels.like; utilisation is told of the whole",
             ratio);
  schema.add("kernels.reach_fp8", &h.reach.fp8, "The same of device.fp8_tflops", ratio);
  schema.add("kernels.reach_memory", &h.reach.memory,
             "The same of device.memory_gbs and operators that memory binds", ratio);
  schema.add("kernels.gap_us", &h.gap_microseconds, "Microseconds between operators", rate);
  schema.add("kernels.step_us", &h.step_microseconds, "Microseconds of the host once a step", rate);
  schema.add("kernels.launch_us", &h.launch_microseconds,
             "Microseconds of the host for an operator that it gives the device by itself", rate);
  schema.add("kernels.graph_us", &h.graph_microseconds,
             "The same of one that the device repeats as part of a CUDA graph", rate);
  schema.add("kernels.update_gbs", &h.update_gbs,
             "GB/s of AdamW; 0: kernels.memory_share of device.memory_gbs", rate);
  schema.add("kernels.product_share", &h.product_share,
             "Share of the rates that products reach where none of the name was measured",
             between(0.01, 1));
  schema.add("kernels.memory_share", &h.memory_share,
             "The same of other operators and the memory's rate", between(0.01, 1));
  schema.add("kernels.measured", &h.measured,
             "Operators' times: \"name format FLOPs bytes seconds\" each");
  return schema;
}

Hardware load_hardware(const std::string& name_or_path) {
  Hardware hardware;
  ConfigSchema schema = make_hardware_schema(hardware);
  std::string where = name_or_path;
  const auto texts = hardware_texts();
  const auto known = std::ranges::find(texts, name_or_path, &HardwareText::name);
  if (known != texts.end()) {
    where = fmt::format("hardware {}", name_or_path);
    schema.load_toml_text(known->text, where);
  } else {
    require(std::filesystem::exists(name_or_path),
            "there is no hardware '{}'{}, and no file of that name; known are {}", name_or_path,
            did_you_mean(name_or_path, hardware_names()), fmt::join(hardware_names(), ", "));
    schema.load_toml(name_or_path);
  }
  if (hardware.name.empty()) hardware.name = name_or_path;
  require_rates(hardware, where);
  if (hardware.like.empty()) return hardware;
  // Shares of one machine's rates become times on another by KernelTimes.
  require(std::ranges::find(texts, hardware.like, &HardwareText::name) != texts.end(),
          "{}: kernels.like is '{}'{}; known are {}", where, hardware.like,
          did_you_mean(hardware.like, hardware_names()), fmt::join(hardware_names(), ", "));
  require(hardware.measured.empty(), "{}: kernels.like and kernels.measured exclude each other",
          where);
  return hardware;
}

std::string write_hardware(const Hardware& hardware) {
  Hardware copy = hardware;
  std::string text = fmt::format("name = \"{}\"\nsource = \"{}\"\n", copy.name, copy.source);
  std::string section;
  Hardware defaults;
  ConfigSchema schema = make_hardware_schema(copy);
  for (const ResolvedValue& value : schema.resolved()) {
    const size_t dot = value.key.find('.');
    if (dot == std::string::npos || value.key == "kernels.measured") continue;
    const std::string own = value.key.substr(0, dot);
    if (own != section) text += fmt::format("\n[{}]\n", section = own);
    text += fmt::format("{} = {}\n", value.key.substr(dot + 1), value.value);
  }
  text += "measured = [\n";
  for (const std::string& sample : copy.measured) text += fmt::format("  \"{}\",\n", sample);
  return text + "]\n";
}

Hardware at_speeds(Hardware hardware, double computing, double links) {
  for (double* rate : {&hardware.f32_tflops, &hardware.bf16_tflops, &hardware.fp8_tflops,
                       &hardware.memory_gbs, &hardware.update_gbs})
    *rate *= computing;
  hardware.gap_microseconds /= computing;
  hardware.step_microseconds /= computing;
  std::vector<std::string> measured;
  for (KernelSample sample : hardware.samples()) {
    sample.seconds /= computing;
    measured.push_back(format_sample(sample));
  }
  hardware.measured = std::move(measured);
  hardware.node.gbs *= links;
  hardware.network.gbs *= links;
  return hardware;
}

std::vector<std::string> hardware_names() {
  std::vector<std::string> names;
  for (const HardwareText& text : hardware_texts()) names.emplace_back(text.name);
  return names;
}

}  // namespace tessera
