#pragma once

#include "train/run/run_record.h"
#include "train/setup/settings.h"
#include "train/verify/run_comparison.h"

namespace tessera {

/// What a layout is held to, and the epsilon of AdamW that makes that possible. With the usual
/// epsilon an update is nearly the gradient's sign: where a gradient is little but rounding, a
/// weight would move by the whole learning rate. A weight's error is the gradient's, times up to 1
/// + the tensor's largest gradient / epsilon.
struct VerifyRule {
  Tolerances tolerances;
  double least_eps = 1e-2;
};

/// For gradients that travel as F32, or as BF16: then every rank's is rounded by 2^-9 of itself
/// before they are summed, and what is left where they cancel has the rounding of the parts.
/// Gradients are held to 2^-6, weights to 2^-4. Muon raises all that is small beside a matrix's
/// largest singular value, roundings with it, by up to 3.4445^5 = 485: its weights are held to 100
/// times the tolerance, and with BF16 to the size of their updates.
VerifyRule verify_rule(const Settings& settings, double tolerance);

struct VerifyRequest {
  Settings settings;
  int64_t num_ranks = 1;
  int64_t steps = 3;
  /// Of what is computed and sent in F32, see VerifyRule.
  double tolerance = 1e-4;
  /// Where the ranks of both runs compute, except for those of the layout where run.device =
  /// "cuda".
  DeviceChooser device = choose_host;
};

/// The same settings for random tokens in place of the data, without warm-up.
Settings without_data(Settings settings);

/// The settings of a small model with the same structure: the same kinds of layers, heads, experts
/// and layout, but short heads, narrow layers, a small vocabulary and short sequences; in F32, on
/// random tokens, with a learning rate whose updates stand out from the rounding of weights.
Settings shrink_for_verification(Settings settings, int64_t num_ranks);

/// Refuses what training would refuse of these settings on `num_ranks` ranks, apart from their
/// data: a shrunk model would run all the same.
void check_as_training(Settings settings, int64_t num_ranks);

/// Runs the layout and one rank on the same few batches of random tokens, on the request's devices
/// and in F32 whatever train.precision says, and compares. Reads nothing but the
/// settings; writes only to a temporary folder. AdamW's epsilon is raised, see VerifyRule. Throws
/// UserError for a layout that cannot run.
///
/// Two things are not compared with one rank over all steps. Where each rank drops by a capacity
/// among its own tokens, the reference has the ranks of TP and CP, and nothing else of the layout.
/// Where gradients travel as BF16, one step is compared: then the weights differ.
Verification verify_layout(const VerifyRequest& request);

}  // namespace tessera
