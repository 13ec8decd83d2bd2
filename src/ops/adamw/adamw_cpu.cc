#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "ops/adamw/adamw.h"
#include "ops/adamw/state_rounding.h"
#include "ops/cpu_dispatch.h"

namespace tessera {
namespace {

constexpr int64_t kChunk = 16384;  ///< elements that a thread takes at a time
constexpr int64_t kBlock = 1024;   ///< of these, in F32 beside what is kept in fewer bits

/// What an update computes with: the state's own memory where that is F32, else values of a block.
struct Values {
  float* master;
  float* m;
  float* v;
};

/// The F32 values of a block, and the random bits with which they are rounded again.
struct Block {
  float master[kBlock];
  float m[kBlock];
  float v[kBlock];
  uint32_t random[kBlock];
};

void update(const AdamWFactors f, float scale, const float* __restrict grad, const Values& values,
            int64_t n) {
  float* __restrict master = values.master;
  float* __restrict m = values.m;
  float* __restrict v = values.v;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    m[i] += (g - m[i]) * f.new_m;
    v[i] = v[i] * f.old_v + f.new_v * g * g;
    const float denominator = std::sqrt(v[i]) / f.sqrt_bias2 + f.eps;
    master[i] = master[i] * f.decay - f.step_size * (m[i] / denominator);
  }
}

void widen(const Bf16* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

void join(const Bf16* __restrict weight, const uint16_t* __restrict remainder, float* __restrict to,
          int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    to[i] = std::bit_cast<float>(join_halves(weight[i].bits, remainder[i]));
}

void find_random_bits(uint32_t update, const float* __restrict grad, const Values& values,
                      uint32_t* __restrict random, int64_t n) {
  const auto word = [](float value) { return std::bit_cast<uint32_t>(value); };
  for (int64_t i = 0; i < n; ++i)
    random[i] = rounding_bits(update, word(grad[i]), word(values.m[i]), word(values.v[i]),
                              word(values.master[i]));
}

template <uint32_t (*kBits)(uint32_t)>
void round_with(const float* __restrict from, const uint32_t* __restrict random,
                Bf16* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    to[i].bits = round_stochastically(std::bit_cast<uint32_t>(from[i]), kBits(random[i]));
}

void round_to_nearest(const float* __restrict from, Bf16* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Bf16(from[i]);
}

void split(const float* __restrict from, Bf16* __restrict weight, uint16_t* __restrict remainder,
           int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = leave_halfway(std::bit_cast<uint32_t>(from[i]));
    weight[i] = Bf16(std::bit_cast<float>(word));
    remainder[i] = static_cast<uint16_t>(word & 0xffffU);
  }
}

/// One slice, as the operator's inputs and outputs have it.
class Slice {
 public:
  Slice(const AdamW& op, const Tensor& grad, std::span<const Tensor> outputs)
      : kind_(op.spec().master()),
        grad_(grad.as<float>()),
        master_(outputs[AdamW::kMaster]),
        m_(outputs[AdamW::kFirstMoment]),
        v_(outputs[AdamW::kSecondMoment]),
        weight_(kind_ == MasterKind::kNone ? nullptr : outputs[AdamW::kWeight].as<Bf16>()) {}

  void update_elements(const AdamWFactors& factors, float scale, int64_t first, int64_t n) const {
    if (master_.dtype == DType::kF32 && m_.dtype == DType::kF32 && v_.dtype == DType::kF32) {
      const Values values = find_values(first, n, nullptr);
      update(factors, scale, grad_ + first, values, n);
      if (weight_ != nullptr) round_to_nearest(values.master, weight_ + first, n);
      return;
    }
    Block block;
    for (int64_t at = 0; at < n; at += kBlock)
      update_block(factors, scale, first + at, std::min(kBlock, n - at), block);
  }

 private:
  void update_block(const AdamWFactors& factors, float scale, int64_t first, int64_t n,
                    Block& block) const {
    const Values values = find_values(first, n, &block);
    if (rounds_randomly()) find_random_bits(factors.update, grad_ + first, values, block.random, n);
    update(factors, scale, grad_ + first, values, n);
    keep_values(values, first, n, block.random);
  }

  bool rounds_randomly() const {
    return m_.dtype != DType::kF32 || v_.dtype != DType::kF32 || master_.dtype == DType::kBF16;
  }

  Values find_values(int64_t first, int64_t n, Block* block) const {
    const auto moment = [&](const Tensor& kept, float* room) {
      if (kept.dtype == DType::kF32) return kept.as<float>() + first;
      widen(kept.as<Bf16>() + first, room, n);
      return room;
    };
    if (block == nullptr)
      return {moment(master_, nullptr), moment(m_, nullptr), moment(v_, nullptr)};
    Values values{block->master, moment(m_, block->m), moment(v_, block->v)};
    if (kind_ == MasterKind::kRemainder) {
      join(weight_ + first, master_.as<uint16_t>() + first, values.master, n);
    } else {
      values.master = moment(master_, block->master);
    }
    return values;
  }

  void keep_values(const Values& values, int64_t first, int64_t n, const uint32_t* random) const {
    if (m_.dtype != DType::kF32)
      round_with<first_moment_bits>(values.m, random, m_.as<Bf16>() + first, n);
    if (v_.dtype != DType::kF32)
      round_with<second_moment_bits>(values.v, random, v_.as<Bf16>() + first, n);
    if (kind_ == MasterKind::kRemainder)
      return split(values.master, weight_ + first, master_.as<uint16_t>() + first, n);
    if (kind_ == MasterKind::kF32) return round_to_nearest(values.master, weight_ + first, n);
    if (master_.dtype != DType::kF32)
      round_with<weight_bits>(values.master, random, master_.as<Bf16>() + first, n);
  }

  MasterKind kind_;
  const float* grad_;
  Tensor master_;
  Tensor m_;
  Tensor v_;
  Bf16* weight_;  // null where the weight is its own master
};

void update_slice(const AdamWFactors& factors, float scale, const Slice& slice, int64_t n) {
  const int64_t num_chunks = (n + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) if (num_chunks > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t first = chunk * kChunk;
    slice.update_elements(factors, scale, first, std::min(kChunk, n - first));
  }
}

void adamw(const AdamW& op, const KernelArgs& args) {
  const size_t num_slices = args.inputs.size() - AdamW::kNumTrailing;
  const float* grad_scale = args.in(num_slices + AdamW::kGradScale).as<float>();
  if (grad_scale[1] != 0) return;
  AdamWFactors factors{};
  std::memcpy(&factors, args.in(num_slices + AdamW::kFactors).as<float>(), sizeof(factors));
  for (size_t i = 0; i < num_slices; ++i) {
    const auto out = args.outputs.subspan(i * op.num_outputs(), op.num_outputs());
    update_slice(factors, grad_scale[0], Slice(op, args.in(i), out), args.in(i).num_elements());
  }
}

}  // namespace

TESSERA_CPU_KERNELS(add_adamw_cpu, table) {
  add_kernel<AdamW>(table, adamw);
}

}  // namespace tessera
