#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "program/program.h"
#include "sim/hardware.h"

namespace tessera {

/// What a device repeats of a step that was recorded (CUDA graphs).
enum class LaunchGraphs : uint8_t {
  kAll,
  kStatic,  ///< what has the same shapes whatever the routing: all but experts and their exchanges
  kNone,
};

/// How a step is run by software that need not be this program, on the same kernels but for what is
/// said here.
struct Software {
  /// What the device repeats of recordings; the host gives it the rest operator by operator.
  LaunchGraphs graphs = LaunchGraphs::kAll;
  /// Microseconds of the host for such an operator, in place of the hardware's.
  std::optional<double> launch_microseconds = {};
  /// More of them for each expert of products, and of what is quantized for them, that software
  /// gives the device expert by expert.
  double expert_microseconds = 0;
  /// Shares of the rates that operators reach, by name, in place of what was measured; 0 of those
  /// that are part of another's kernel.
  std::map<std::string, double, std::less<>> operator_shares = {};
  /// Whether attention stores the scores of all pairs of tokens, masked ones too, as software does
  /// that has no fused kernel of its kind: two products apart, and passes over the scores between.
  bool stores_scores = false;
  /// Groups by name whose exchanges are cut into as many pieces as ranks, and the products that
  /// make or read them likewise, so that each piece travels while another is worked on.
  std::vector<std::string> pipelined = {};
};

/// Seconds of the host for one operator.
double host_seconds(const Software& software, const Hardware& hardware, const Program& program,
                    const Node& node);

/// Of attention, or its gradient, that stores scores; nothing of another operator.
std::optional<double> stored_scores_seconds(const Node& node, const ValueType& q,
                                            const Hardware& hardware);

/// By node the pieces of a program's exchanges that are pipelined, and of the products beside them:
/// that which makes what is summed, or the first that reads what is gathered; of others one.
struct Pieces {
  std::vector<int64_t> of_node;
  std::map<size_t, size_t> product_of;  ///< by the exchange's node
};
Pieces find_pieces(const Software& software, const Program& program);

/// What is left of an exchange of so many ranks that travels piece by piece beside a product.
double pipelined_seconds(double exchange, double product, int64_t num_ranks);

}  // namespace tessera
