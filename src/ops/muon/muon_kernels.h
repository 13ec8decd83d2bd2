#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "ops/adamw/adamw_factors.h"
#include "ops/adamw/state_formats.h"
#include "ops/muon/muon_factors.h"

namespace tessera::cuda {

/// What all matrices of a call share, in the device's memory.
struct MuonStep {
  const MuonFactors* factors;
  const AdamWGradScale* grad_scale;
};

struct MuonGradient {
  const float* grad;
  void* m;
};
/// MuonMomentum on matrices of `elements` each: one launch for up to 64. `u` [matrices, elements].
void launch_muon_momentum(DType m, DType u_type, const MuonStep& step,
                          std::span<const MuonGradient> matrices, void* u, int64_t elements,
                          cudaStream_t stream);

struct MuonScaledGradient {
  const float* grad;
  void* m;
  uint8_t* m_scale;
};
/// The same where `m` has scales, of matrices [rows, columns].
void launch_muon_scaled_momentum(MomentKind m, DType u_type, const MuonStep& step,
                                 std::span<const MuonScaledGradient> matrices, void* u,
                                 int64_t rows, int64_t columns, cudaStream_t stream);

struct MuonWeight {
  void* master;  ///< MuonUpdate::kMaster
  void* weight;  ///< BF16, where a master or remainder is beside it
};
/// MuonUpdate, likewise, of `o` [matrices, elements].
void launch_muon_update(DType master, bool has_weight, DType o_type, const MuonStep& step,
                        std::span<const MuonWeight> matrices, const void* o, int64_t elements,
                        cudaStream_t stream);

}  // namespace tessera::cuda
