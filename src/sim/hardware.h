#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/format.h"

namespace tessera {

/// What joins two ranks: seconds that an exchange takes beside its bytes, for each doubling of its
/// ranks, and GB/s that a rank sends while it receives as many.
struct LinkRates {
  double microseconds = 0;
  double gbs = 0;
};

/// One operator's time, measured: what it is and how much it does tell the shape.
struct KernelSample {
  std::string name;    ///< of the operator
  std::string format;  ///< of its first operand: "bf16"
  double flops = 0;
  double bytes = 0;
  double seconds = 0;
};

/// Shares of rates, over others: of products in BF16 and FP8, and of memory.
struct Reach {
  double bf16 = 1;
  double fp8 = 1;
  double memory = 1;
};

/// A machine as the simulator knows it: the contents of a hardware file. Rates of matrix products
/// and memory are those that nothing exceeds; what kernels reach of them is measured
/// (KernelSample), or an estimate where nothing was.
struct Hardware {
  std::string name;
  std::string source;  ///< where the figures come from

  bool on_host = false;  ///< the devices are processors
  double f32_tflops = 0;
  double bf16_tflops = 0;
  double fp8_tflops = 0;
  double memory_gbs = 0;
  std::string memory;  ///< of a device

  int64_t node_devices = 1;  ///< that a node has
  /// Processors that these share, each computing on one at a time; 0: each has its own.
  int64_t node_processors = 0;
  double host_gbs = 50;  ///< between a device and the host's memory, each way
  std::string host_memory;
  /// Of a node's memory, read and written together, where the host's threads update (optim.update).
  double host_update_gbs = 200;
  LinkRates node;     ///< between devices of a node
  LinkRates network;  ///< between nodes, for each device
  /// The share of a device that an exchange takes from computation beside it.
  double exchange_share = 0;

  std::string like;  ///< hardware whose kernels are taken to reach the same shares
  /// What the same kernels reach of this hardware's rates, over what they reach of those of `like`.
  Reach reach;
  double gap_microseconds = 0;   ///< between an operator and the next
  double step_microseconds = 0;  ///< of the host, once a step
  /// Of the host for an operator, given to the device one by one or recorded with others.
  double launch_microseconds = 0;
  double graph_microseconds = 0;
  double update_gbs = 0;       ///< of memory, where AdamW updates; 0: as memory_gbs allows
  double product_share = 0.7;  ///< of the rates, where no kernel of the name was measured
  double memory_share = 0.75;
  std::vector<std::string> measured;  ///< "linear bf16 1.1e+12 3.3e+08 0.0017": KernelSample

  int64_t memory_bytes() const;
  int64_t host_memory_bytes() const;
  /// FLOP/s of matrix products of such operands, of which kernels reach what they do on `like`; of
  /// what has no rate of its own, those of F32.
  double matrix_rate(std::string_view format) const;
  /// Bytes a second, likewise.
  double memory_rate() const;
  std::vector<KernelSample> samples() const;
};

std::string format_sample(const KernelSample& sample);

/// The same hardware where devices compute `computing` times as fast, and links carry `links` times
/// as much.
Hardware at_speeds(Hardware hardware, double computing, double links);

/// Binds the keys of a hardware file.
ConfigSchema make_hardware_schema(Hardware& hardware);

/// Hardware by the name of a description that comes with the program (hardware_names), or by the
/// path of a file in the same form. Throws UserError for what is neither, for unknown keys, rates
/// that are missing, and measurements that cannot be read or are of unknown operators.
Hardware load_hardware(const std::string& name_or_path);

/// A file that load_hardware reads.
std::string write_hardware(const Hardware& hardware);

std::vector<std::string> hardware_names();

}  // namespace tessera
