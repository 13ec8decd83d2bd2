#include <algorithm>
#include <bit>
#include <cstring>

#include "ops/adamw/coded_block.h"
#include "ops/adamw/state_rounding.h"
#include "ops/cpu_dispatch.h"
#include "ops/muon/muon.h"

namespace tessera {
namespace {

constexpr int64_t kChunk = 16384;  ///< elements that a thread takes at a time

uint32_t word(float value) {
  return std::bit_cast<uint32_t>(value);
}

void keep(float* to, float value, uint32_t /*random*/) {
  *to = value;
}
void keep(Bf16* to, float value, uint32_t random) {
  to->bits = round_stochastically(word(value), random);
}

/// Calls run(matrix, first element, end) for parts of matrices of n elements each, or of n blocks,
/// so many of which are a part.
template <typename Run>
void for_each_part(int64_t num_matrices, int64_t n, int64_t of_part, const Run& run) {
  const int64_t parts = (n + of_part - 1) / of_part;
#pragma omp parallel for schedule(static) if (num_matrices * parts > 1)
  for (int64_t i = 0; i < num_matrices * parts; ++i) {
    const int64_t first = i % parts * of_part;
    run(i / parts, first, std::min(n, first + of_part));
  }
}

template <typename M, typename U>
void average(const MuonFactors f, float scale, const float* __restrict grad, M* __restrict kept,
             U* __restrict u, int64_t n) {
  constexpr bool kRandom = !std::is_same_v<M, float>;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    const float old = kept[i];
    const float m = old + (g - old) * f.new_m;
    u[i] = U(g + (m - g) * f.averaged);
    const uint32_t random =
        kRandom ? first_moment_bits(rounding_bits(f.update, word(grad[i]), word(old), 0, 0)) : 0;
    keep(kept + i, m, random);
  }
}

template <typename Run>
void with_storage(DType dtype, const Run& run) {
  dtype == DType::kF32 ? run.template operator()<float>() : run.template operator()<Bf16>();
}

MuonFactors read_factors(const Tensor& tensor) {
  MuonFactors factors{};
  std::memcpy(&factors, tensor.as<float>(), sizeof(factors));
  return factors;
}

/// The same of one block, whose averages share a scale.
template <typename Code, typename U>
void average_block(const MuonFactors f, float scale, const float* __restrict grad,
                   typename Code::Code* __restrict kept, uint8_t* kept_scale, U* __restrict u,
                   int64_t n) {
  float m[kMomentBlock];
  uint32_t random[kMomentBlock];
  decode_block<Code>(kept, *kept_scale, m, n);
  for (int64_t i = 0; i < n; ++i)
    random[i] = rounding_bits(f.update, word(grad[i]), word(m[i]), 0, 0);
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    m[i] += (g - m[i]) * f.new_m;
    u[i] = U(g + (m[i] - g) * f.averaged);
  }
  *kept_scale = encode_block<Code, first_moment_bits>(m, random, kept, n);
}

/// What a call has of a matrix.
struct Averages {
  const Tensor& grad;
  const Tensor& m;
  const Tensor& m_scale;
};

/// Blocks [first, end) of a matrix, those of a row one after the other.
template <typename Code, typename U>
void average_blocks(const MuonFactors& factors, float scale, const Averages& matrix, U* u,
                    int64_t first, int64_t end) {
  const int64_t columns = matrix.grad.shape[1];
  const int64_t of_row = count_moment_blocks(columns);
  for (int64_t block = first; block < end; ++block) {
    const int64_t column = block % of_row * kMomentBlock;
    const int64_t at = block / of_row * columns + column;
    average_block<Code>(factors, scale, matrix.grad.as<float>() + at,
                        static_cast<typename Code::Code*>(matrix.m.data) + at,
                        matrix.m_scale.as<uint8_t>() + block, u + at,
                        std::min(kMomentBlock, columns - column));
  }
}

void average_scaled(const MuonMomentum& op, const KernelArgs& args, const MuonFactors& factors,
                    float scale, int64_t batch) {
  const Tensor& u = args.out(batch * op.num_kept());
  const Shape& shape = args.in(0).shape;
  const int64_t num_blocks = shape[0] * count_moment_blocks(shape[1]);
  with_first_moment_code(op.spec().formats.first_moment, [&]<typename Code>() {
    with_storage(u.dtype, [&]<typename U>() {
      for_each_part(
          batch, num_blocks, kChunk / kMomentBlock, [&](int64_t i, int64_t first, int64_t end) {
            average_blocks<Code>(factors, scale, {args.in(i), args.out(2 * i), args.out(2 * i + 1)},
                                 u.as<U>() + i * u.shape[1], first, end);
          });
    });
  });
}

void muon_momentum(const MuonMomentum& op, const KernelArgs& args) {
  const int64_t batch = std::ssize(args.inputs) - MuonMomentum::kNumTrailing;
  const float* const scale = args.in(batch + MuonMomentum::kGradScale).as<float>();
  if (scale[1] != 0) return;
  const MuonFactors factors = read_factors(args.in(batch + MuonMomentum::kFactors));
  if (op.scaled()) return average_scaled(op, args, factors, scale[0], batch);
  const Tensor& u = args.out(batch);
  const int64_t n = u.shape[1];
  with_storage(moment_dtype(op.spec().formats.first_moment), [&]<typename M>() {
    with_storage(u.dtype, [&]<typename U>() {
      for_each_part(batch, n, kChunk, [&](int64_t i, int64_t first, int64_t end) {
        average(factors, scale[0], args.in(i).as<float>() + first, args.out(i).as<M>() + first,
                u.as<U>() + i * n + first, end - first);
      });
    });
  });
}

float updated(const MuonFactors& f, float weight, float orthogonal) {
  return weight * f.decay - f.step_size * orthogonal;
}

/// The weight is its own master.
template <typename T>
void update_alone(const MuonFactors f, const T* __restrict o, T* __restrict weight, int64_t n) {
  constexpr bool kRandom = !std::is_same_v<T, float>;
  for (int64_t i = 0; i < n; ++i) {
    const float old = weight[i];
    const uint32_t random =
        kRandom ? weight_bits(rounding_bits(f.update, word(o[i]), 0, 0, word(old))) : 0;
    keep(weight + i, updated(f, old, o[i]), random);
  }
}

void update_master(const MuonFactors f, const Bf16* __restrict o, float* __restrict master,
                   Bf16* __restrict weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    master[i] = updated(f, master[i], o[i]);
    weight[i] = Bf16(master[i]);
  }
}

template <typename Remainder>
void update_remainder(const MuonFactors f, const Bf16* __restrict o,
                      Remainder* __restrict remainder, Bf16* __restrict weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const auto old = std::bit_cast<float>(join_halves(weight[i].bits, lower_half(remainder[i])));
    const uint32_t random = weight_bits(rounding_bits(f.update, word(o[i]), 0, 0, word(old)));
    const uint32_t next = word_with_remainder<Remainder>(word(updated(f, old, o[i])), random);
    weight[i] = Bf16(std::bit_cast<float>(next));
    remainder[i] = remainder_of<Remainder>(next);
  }
}

/// Elements [first, end) of matrix i.
void update_part(const MuonUpdate& op, const KernelArgs& args, const MuonFactors& factors,
                 int64_t i, int64_t first, int64_t end) {
  const Tensor& o = args.in(MuonUpdate::kOrthogonal);
  const int64_t at = i * o.shape[1] + first;
  const auto outputs = args.outputs.subspan(i * op.num_outputs(), op.num_outputs());
  const Tensor& master = outputs[MuonUpdate::kMaster];
  if (o.dtype == DType::kF32)
    return update_alone(factors, o.as<float>() + at, master.as<float>() + first, end - first);
  const Bf16* const from = o.as<Bf16>() + at;
  if (op.num_outputs() == 1)
    return update_alone(factors, from, master.as<Bf16>() + first, end - first);
  Bf16* const weight = outputs[MuonUpdate::kWeight].as<Bf16>() + first;
  if (op.spec().master() == MasterKind::kF32)
    return update_master(factors, from, master.as<float>() + first, weight, end - first);
  if (op.spec().master() == MasterKind::kRemainder8)
    return update_remainder(factors, from, master.as<uint8_t>() + first, weight, end - first);
  update_remainder(factors, from, master.as<uint16_t>() + first, weight, end - first);
}

void muon_update(const MuonUpdate& op, const KernelArgs& args) {
  if (args.in(MuonUpdate::kGradScale).as<float>()[1] != 0) return;
  const MuonFactors factors = read_factors(args.in(MuonUpdate::kFactors));
  const Shape& shape = args.in(MuonUpdate::kOrthogonal).shape;
  for_each_part(shape[0], shape[1], kChunk, [&](int64_t i, int64_t first, int64_t end) {
    update_part(op, args, factors, i, first, end);
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_muon_cpu, table) {
  add_kernel<MuonMomentum>(table, muon_momentum);
  add_kernel<MuonUpdate>(table, muon_update);
}

}  // namespace tessera
