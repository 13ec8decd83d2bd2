#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/adamw/adamw.h"
#include "ops/adamw/coded_block.h"
#include "ops/adamw/state_rounding.h"
#include "ops/cpu_dispatch.h"

namespace tessera {
namespace {

constexpr int64_t kChunk = 16384;     ///< elements of a slice, or of a row
constexpr int64_t kChunksAtOnce = 4;  ///< that a thread takes
constexpr int64_t kBlock = 1024;      ///< of these, in F32 beside what is kept in fewer bits
static_assert(kBlock % kMomentBlock == 0);

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
  float grad[kBlock];
  uint32_t random[kBlock];
};

/// The roundings of update_element in adamw_update.cuh, so that a GPU's bits are the host's: what
/// the host updates for a GPU may be updated by that after a resume.
void update(const AdamWFactors f, float scale, const float* __restrict grad, const Values& values,
            int64_t n) {
  float* __restrict master = values.master;
  float* __restrict m = values.m;
  float* __restrict v = values.v;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    m[i] = std::fma(std::fma(grad[i], scale, -m[i]), f.new_m, m[i]);
    v[i] = std::fma(g, f.new_v * g, v[i] * f.old_v);
    const float denominator = std::sqrt(v[i]) / f.sqrt_bias2 + f.eps;
    master[i] = std::fma(master[i], f.decay, -(f.step_size * (m[i] / denominator)));
  }
}

void widen(const Bf16* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

template <typename Remainder>
void join(const Bf16* __restrict weight, const Remainder* __restrict remainder,
          float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    to[i] = std::bit_cast<float>(join_halves(weight[i].bits, lower_half(remainder[i])));
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

template <typename Remainder>
void split(const float* __restrict from, const uint32_t* __restrict random, Bf16* __restrict weight,
           Remainder* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = sizeof(Remainder) == 2 ? 0 : weight_bits(random[i]);
    const uint32_t word = word_with_remainder<Remainder>(std::bit_cast<uint32_t>(from[i]), bits);
    weight[i] = Bf16(std::bit_cast<float>(word));
    remainder[i] = remainder_of<Remainder>(word);
  }
}

/// Calls run(first element, place of its scale, elements) for the blocks of n elements.
template <typename Run>
void for_each_moment_block(int64_t n, const Run& run) {
  for (int64_t at = 0; at < n; at += kMomentBlock)
    run(at, at / kMomentBlock, std::min(kMomentBlock, n - at));
}

/// Elements of a slice that lie in one row, or in several whose blocks are all whole.
struct Part {
  int64_t first;  ///< element of the slice
  int64_t scale;  ///< block of the slice, where its moments have scales
  int64_t n;
  Part take(int64_t at, int64_t most) const {
    return {first + at, scale + at / kMomentBlock, std::min(most, n - at)};
  }
};

/// A moment of a slice, in F32 or in fewer bits.
class KeptMoment {
 public:
  KeptMoment(MomentKind kind, const Tensor& kept, const Tensor* scales)
      : kind_(kind), kept_(kept), scales_(scales != nullptr ? scales->as<uint8_t>() : nullptr) {}

  bool is_f32() const { return kind_ == MomentKind::kF32; }

  /// Its own memory where that is F32, else `room` with the values.
  template <Moment kMoment>
  float* find_values(const Part& part, float* room) const {
    if (is_f32()) return kept_.as<float>() + part.first;
    if (kind_ == MomentKind::kBF16) {
      widen(kept_.as<Bf16>() + part.first, room, part.n);
      return room;
    }
    with_code<kMoment>([&]<typename Code>() {
      const auto* const codes = codes_at<Code>(part);
      for_each_moment_block(part.n, [&](int64_t at, int64_t block, int64_t n) {
        decode_block<Code>(codes + at, scales_[part.scale + block], room + at, n);
      });
    });
    return room;
  }

  template <Moment kMoment>
  void keep(const float* values, const uint32_t* random, const Part& part) const {
    constexpr auto kBits = kMoment == Moment::kFirst ? first_moment_bits : second_moment_bits;
    if (is_f32()) return;
    if (kind_ == MomentKind::kBF16)
      return round_with<kBits>(values, random, kept_.as<Bf16>() + part.first, part.n);
    with_code<kMoment>([&]<typename Code>() {
      auto* const codes = codes_at<Code>(part);
      for_each_moment_block(part.n, [&](int64_t at, int64_t block, int64_t n) {
        scales_[part.scale + block] =
            encode_block<Code, kBits>(values + at, random + at, codes + at, n);
      });
    });
  }

 private:
  template <Moment kMoment, typename Run>
  void with_code(const Run& run) const {
    kMoment == Moment::kFirst ? with_first_moment_code(kind_, run)
                              : with_second_moment_code(kind_, run);
  }
  template <typename Code>
  typename Code::Code* codes_at(const Part& part) const {
    return static_cast<typename Code::Code*>(kept_.data) + part.first;
  }

  MomentKind kind_;
  Tensor kept_;
  uint8_t* scales_;  // null without
};

/// One slice, as the operator's inputs and outputs have it.
class StateSlice {
 public:
  StateSlice(const AdamW& op, const Tensor& grad, std::span<const Tensor> outputs)
      : kind_(op.spec().master()),
        grad_(grad),
        master_(outputs[AdamW::kMaster]),
        m_(op.spec().formats.first_moment, outputs[AdamW::kFirstMoment],
           scales_of(op.spec().formats.first_moment, outputs, op.first_scales())),
        v_(op.spec().formats.second_moment, outputs[AdamW::kSecondMoment],
           scales_of(op.spec().formats.second_moment, outputs, op.second_scales())),
        weight_(kind_ == MasterKind::kNone ? nullptr : outputs[AdamW::kWeight].as<Bf16>()) {}

  void update_elements(const AdamWFactors& factors, float scale, const Part& part) const {
    if (grad_.dtype == DType::kF32 && master_.dtype == DType::kF32 && m_.is_f32() && v_.is_f32()) {
      for (int64_t at = 0; at < part.n; at += kBlock) {
        const Part own = part.take(at, kBlock);
        const Values values = find_values(own, nullptr);
        update(factors, scale, find_grads(own, nullptr), values, own.n);
        if (weight_ != nullptr) round_to_nearest(values.master, weight_ + own.first, own.n);
      }
      return;
    }
    Block block;
    for (int64_t at = 0; at < part.n; at += kBlock)
      update_block(factors, scale, part.take(at, kBlock), block);
  }

 private:
  static const Tensor* scales_of(MomentKind kind, std::span<const Tensor> outputs, int place) {
    return has_scales(kind) ? &outputs[place] : nullptr;
  }

  void update_block(const AdamWFactors& factors, float scale, const Part& part,
                    Block& block) const {
    const Values values = find_values(part, &block);
    const float* const grad = find_grads(part, block.grad);
    if (rounds_randomly()) find_random_bits(factors.update, grad, values, block.random, part.n);
    update(factors, scale, grad, values, part.n);
    m_.keep<Moment::kFirst>(values.m, block.random, part);
    v_.keep<Moment::kSecond>(values.v, block.random, part);
    keep_master(values.master, part.first, part.n, block.random);
  }

  bool rounds_randomly() const {
    return !m_.is_f32() || !v_.is_f32() || master_.dtype == DType::kBF16 ||
           kind_ == MasterKind::kRemainder8;
  }

  const float* find_grads(const Part& part, float* room) const {
    if (grad_.dtype == DType::kF32) return grad_.as<float>() + part.first;
    widen(grad_.as<Bf16>() + part.first, room, part.n);
    return room;
  }

  Values find_values(const Part& part, Block* block) const {
    const bool all_f32 = block == nullptr;
    return {find_masters(part.first, part.n, all_f32 ? nullptr : block->master),
            m_.find_values<Moment::kFirst>(part, all_f32 ? nullptr : block->m),
            v_.find_values<Moment::kSecond>(part, all_f32 ? nullptr : block->v)};
  }

  float* find_masters(int64_t first, int64_t n, float* room) const {
    if (master_.dtype == DType::kF32) return master_.as<float>() + first;
    if (kind_ == MasterKind::kRemainder) {
      join(weight_ + first, master_.as<uint16_t>() + first, room, n);
    } else if (kind_ == MasterKind::kRemainder8) {
      join(weight_ + first, master_.as<uint8_t>() + first, room, n);
    } else {
      widen(master_.as<Bf16>() + first, room, n);
    }
    return room;
  }

  void keep_master(const float* values, int64_t first, int64_t n, const uint32_t* random) const {
    if (kind_ == MasterKind::kRemainder)
      return split(values, random, weight_ + first, master_.as<uint16_t>() + first, n);
    if (kind_ == MasterKind::kRemainder8)
      return split(values, random, weight_ + first, master_.as<uint8_t>() + first, n);
    if (kind_ == MasterKind::kF32) return round_to_nearest(values, weight_ + first, n);
    if (master_.dtype != DType::kF32)
      round_with<weight_bits>(values, random, master_.as<Bf16>() + first, n);
  }

  MasterKind kind_;
  Tensor grad_;
  Tensor master_;
  KeptMoment m_;
  KeptMoment v_;
  Bf16* weight_;  // null where the weight is its own master
};

/// A slice cut into chunks, which all slices' chunks are counted through.
class SliceChunks {
 public:
  /// `grad` is [n], or [rows, columns] whose rows are cut into blocks each for itself.
  SliceChunks(const StateSlice& slice, const Shape& grad, int64_t first_chunk)
      : slice_(slice), first_chunk_(first_chunk) {
    const bool rows_apart = grad.rank() == 2 && grad[1] % kMomentBlock != 0;
    const int64_t rows = rows_apart ? grad[0] : 1;
    columns_ = rows_apart ? grad[1] : grad.num_elements();
    chunks_of_row_ = (columns_ + kChunk - 1) / kChunk;
    end_chunk_ = first_chunk + rows * chunks_of_row_;
  }
  int64_t end_chunk() const { return end_chunk_; }

  void update(const AdamWFactors& factors, float scale, int64_t chunk) const {
    const int64_t row = (chunk - first_chunk_) / chunks_of_row_;
    const int64_t of_row = (chunk - first_chunk_) % chunks_of_row_;
    const Part whole{row * columns_, row * count_moment_blocks(columns_), columns_};
    slice_.update_elements(factors, scale, whole.take(of_row * kChunk, kChunk));
  }

 private:
  StateSlice slice_;
  int64_t first_chunk_;
  int64_t columns_;
  int64_t chunks_of_row_;
  int64_t end_chunk_;
};

/// Threads take chunks of any slice as they become free: elements have nothing to do with one
/// another, nor are they in a thread's cache.
void adamw(const AdamW& op, const KernelArgs& args) {
  const size_t num_slices = args.inputs.size() - AdamW::kNumTrailing;
  const float* grad_scale = args.in(num_slices + AdamW::kGradScale).as<float>();
  if (grad_scale[1] != 0) return;
  AdamWFactors factors{};
  std::memcpy(&factors, args.in(num_slices + AdamW::kFactors).as<float>(), sizeof(factors));
  std::vector<SliceChunks> slices;
  int64_t num_chunks = 0;
  for (size_t i = 0; i < num_slices; ++i) {
    const auto out = args.outputs.subspan(i * op.num_outputs(), op.num_outputs());
    slices.emplace_back(StateSlice(op, args.in(i), out), args.in(i).shape, num_chunks);
    num_chunks = slices.back().end_chunk();
  }
#pragma omp parallel for schedule(dynamic, kChunksAtOnce) if (num_chunks > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::ranges::upper_bound(slices, chunk, {}, &SliceChunks::end_chunk)
        ->update(factors, grad_scale[0], chunk);
  }
}

}  // namespace

TESSERA_CPU_KERNELS(add_adamw_cpu, table) {
  add_kernel<AdamW>(table, adamw);
}

}  // namespace tessera
