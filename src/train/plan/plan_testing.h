#pragma once

#include <string>
#include <vector>

#include "sim/hardware.h"
#include "train/state/load_settings.h"

namespace tessera::testing {

/// Nodes of four small processors.
inline Hardware small_machine() {
  Hardware hardware{.name = "small",
                    .source = "a test",
                    .on_host = true,
                    .f32_tflops = 0.1,
                    .bf16_tflops = 0.1,
                    .memory_gbs = 20,
                    .memory = "2GiB",
                    .node_devices = 4,
                    .host_memory = "16GiB"};
  hardware.node = {.microseconds = 20, .gbs = 5};
  hardware.network = {.microseconds = 50, .gbs = 1};
  hardware.exchange_share = 0.1;
  return hardware;
}

inline Settings settings_to_plan(const std::vector<std::string>& more) {
  std::vector<std::string> overrides = {
      "--model.preset=tiny",       "--model.vocab_size=256", "--model.num_layers=8",
      "--data.sequence_length=64", "--train.micro_batch=1",  "--train.global_batch=64",
      "--run.device=cpu",          "--moe.num_experts=8",    "--run.background_save=false"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, "", overrides);
  return settings;
}

}  // namespace tessera::testing
