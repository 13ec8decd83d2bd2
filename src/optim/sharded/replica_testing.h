#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "comm/thread/thread_world.h"
#include "core/random.h"
#include "optim/exchange/gradient_reducer.h"
#include "optim/replicas.h"

namespace tessera {

/// A cut of the ranks into replica groups; each group's ranks come in inner groups of
/// `inner_size` that stand side by side.
struct ReplicaCut {
  std::string name;
  std::vector<std::vector<int64_t>> groups;
  int64_t inner_size = 1;

  size_t group_of(int64_t rank) const {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (std::ranges::find(groups[g], rank) != groups[g].end()) return g;
    }
    throw InternalError("a rank without a group");
  }

  /// All ranks of `world` call it.
  ReplicaGroup connect(World& world) const {
    const std::vector<int64_t>& ranks = groups[group_of(world.rank())];
    if (inner_size == 1) return {.outer = world.make_group(name, ranks)};
    const int64_t place = std::ranges::find(ranks, world.rank()) - ranks.begin();
    std::vector<int64_t> inner, outer;
    for (int64_t i = 0; i < std::ssize(ranks); ++i) {
      if (i / inner_size == place / inner_size) inner.push_back(ranks[i]);
      if (i % inner_size == place % inner_size) outer.push_back(ranks[i]);
    }
    return {.outer = world.make_group(name + ".outer", outer),
            .inner = world.make_group(name + ".inner", inner)};
  }
};

/// A global parameter, whose rows are cut over the groups of a ReplicaCut.
struct SpreadParameter {
  std::string name;
  Shape global;
  DType dtype = DType::kF32;
  size_t cut = 0;
  std::optional<bool> decay = std::nullopt;
  double lr_multiplier = 1.0;
  std::vector<int64_t> matrix_rows = {};
};

/// A model of random weights spread over ranks, each of which makes its own gradients.
struct SpreadModel {
  int64_t num_ranks = 1;
  std::vector<ReplicaCut> cuts;
  std::vector<SpreadParameter> parameters;
  uint64_t seed = 0;

  Slice slice(size_t idx, int64_t rank) const {
    const ReplicaCut& cut = cuts[parameters[idx].cut];
    const auto group = static_cast<int64_t>(cut.group_of(rank));
    const IndexRange rows = group_rows(parameters[idx], group, std::ssize(cut.groups));
    return Slice::whole(parameters[idx].global).take_rows(rows.begin, rows.count);
  }

  /// Of parameters made of matrices, whole ones.
  static IndexRange group_rows(const SpreadParameter& p, int64_t group, int64_t num_groups) {
    const auto bound = [&](int64_t i) {
      if (p.matrix_rows.empty()) return p.global[0] * i / num_groups;
      const int64_t matrices = std::ssize(p.matrix_rows) * i / num_groups;
      return std::accumulate(p.matrix_rows.begin(), p.matrix_rows.begin() + matrices, int64_t{0});
    };
    return {bound(group), bound(group + 1) - bound(group)};
  }

  /// The matrices of a rank's slice.
  std::vector<int64_t> matrices(size_t idx, int64_t rank) const {
    const ReplicaCut& cut = cuts[parameters[idx].cut];
    const auto group = static_cast<int64_t>(cut.group_of(rank));
    return take_matrices(parameters[idx].matrix_rows,
                         group_rows(parameters[idx], group, std::ssize(cut.groups)));
  }

  std::vector<float> random_values(size_t idx, uint64_t stream, int64_t count) const {
    std::vector<float> values(count);
    fill_normal(values, seed, mix(stream, idx), 1.0F);
    return values;
  }

  OwnedTensor initial_weight(size_t idx) const {
    OwnedTensor weight(parameters[idx].dtype, parameters[idx].global);
    const auto values = random_values(idx, 1, weight.get().num_elements());
    if (weight.get().dtype == DType::kF32) {
      std::ranges::copy(values, weight.get().as<float>());
    } else {
      std::ranges::transform(values, weight.get().as<Bf16>(), [](float v) { return Bf16(v); });
    }
    return weight;
  }

  std::vector<float> local_gradient(size_t idx, int64_t rank, int64_t step) const {
    const auto stream = static_cast<uint64_t>(100 + step * num_ranks + rank);
    return random_values(idx, stream, slice(idx, rank).shape().num_elements());
  }

  /// The sum over a group in the order in which the optimizer makes it.
  std::vector<float> summed_gradient(size_t idx, int64_t rank, int64_t step,
                                     GradientCompression compression) const {
    const ReplicaCut& cut = cuts[parameters[idx].cut];
    const std::vector<int64_t>& ranks = cut.groups[cut.group_of(rank)];
    const bool rounded =
        compression == GradientCompression::kBf16 && std::ssize(ranks) > cut.inner_size;
    std::vector<float> total;
    for (size_t first = 0; first < ranks.size(); first += static_cast<size_t>(cut.inner_size)) {
      std::vector<float> part = local_gradient(idx, ranks[first], step);
      for (size_t i = 1; i < static_cast<size_t>(cut.inner_size); ++i)
        add(part, local_gradient(idx, ranks[first + i], step));
      if (rounded) std::ranges::transform(part, part.begin(), [](float v) { return Bf16(v); });
      if (first == 0) total.assign(part.size(), 0.0F);
      add(total, part);
    }
    return total;
  }

  static void add(std::vector<float>& sum, const std::vector<float>& values) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
};

/// Any of the ways in which an optimizer keeps the state of a model.
inline OptimizerOptions random_state(Random& random) {
  const auto moment = [&] { return static_cast<MomentKind>(random.next_below(4)); };
  const MomentKind first_moment = moment();
  return {.formats = {.first_moment = first_moment,
                      .second_moment = moment(),
                      .master = static_cast<MasterKind>(random.next_below(4))},
          .muon = {.nesterov = random.next_below(2) == 0}};
}

/// The global model in one process, under Optimizer.
class ReferenceModel {
 public:
  ReferenceModel(const SpreadModel& model, const OptimizerOptions& options) : model_(model) {
    std::vector<Parameter> parameters;
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      const SpreadParameter& p = model.parameters[i];
      weights.push_back(model.initial_weight(i));
      grads.emplace_back(DType::kF32, p.global);
      parameters.push_back({p.name, weights[i], grads[i], p.decay, p.lr_multiplier, p.matrix_rows});
    }
    optimizer = std::make_unique<Optimizer>(parameters, options);
  }

  StepResult step(const StepInput& input, GradientCompression compression) {
    for (size_t i = 0; i < grads.size(); ++i) {
      for (const auto& ranks : model_.cuts[model_.parameters[i].cut].groups) {
        std::vector<float> sum = model_.summed_gradient(i, ranks[0], input.step_idx, compression);
        const Slice slice = model_.slice(i, ranks[0]);
        copy_slice_into(slice, view(std::span(sum), slice.shape()), grads[i]);
      }
    }
    return optimizer->step(input);
  }

  std::vector<OwnedTensor> weights;
  std::vector<OwnedTensor> grads;
  std::unique_ptr<Optimizer> optimizer;

 private:
  const SpreadModel& model_;
};

/// One rank's part of a SpreadModel: weights and gradients in a buffer each, without gaps, or with.
class RankModel {
 public:
  RankModel(const SpreadModel& model, int64_t rank, int64_t gap_bytes)
      : model_(model), rank_(rank) {
    int64_t weight_bytes = 0;
    int64_t grad_bytes = 0;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) {
        weights_ = Buffer(weight_bytes, "weights");
        grads_ = Buffer(grad_bytes, "gradients");
      }
      weight_bytes = grad_bytes = 0;
      for (size_t i = 0; i < model.parameters.size(); ++i) {
        const SpreadParameter& p = model.parameters[i];
        const Slice slice = model.slice(i, rank);
        weight_bytes = align_up(weight_bytes, dtype_size(p.dtype));
        if (pass == 1) {
          const Tensor weight = weights_.tensor(weight_bytes, p.dtype, slice.shape());
          const Tensor grad = grads_.tensor(grad_bytes, DType::kF32, slice.shape());
          parameters.push_back(
              {{p.name, weight, grad, p.decay, p.lr_multiplier, model.matrices(i, rank)},
               slice,
               p.cut});
        }
        const int64_t elements = slice.shape().num_elements();
        weight_bytes += elements * dtype_size(p.dtype) + gap_bytes;
        grad_bytes += elements * dtype_size(DType::kF32) + gap_bytes;
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i)
      copy_slice_from(parameters[i].slice, model.initial_weight(i), parameters[i].parameter.weight);
  }

  void make_gradients(int64_t step) const {
    for (size_t i = 0; i < parameters.size(); ++i)
      std::ranges::copy(model_.local_gradient(i, rank_, step),
                        parameters[i].parameter.grad.as<float>());
  }

  std::vector<ReplicatedParameter> parameters;

 private:
  const SpreadModel& model_;
  int64_t rank_;
  Buffer weights_;
  Buffer grads_;
};

/// A random cut of 0, 1, ... into groups of one size, or of any sizes.
inline ReplicaCut random_cut(Random& random, const std::string& name, int64_t num_ranks) {
  ReplicaCut cut = {.name = name, .groups = {}};
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size <= num_ranks; ++size) {
    if (num_ranks % size == 0) sizes.push_back(size);
  }
  const int64_t size = sizes[random.next_below(sizes.size())];
  const int64_t stride = random.next_below(2) == 0 ? 1 : num_ranks / size;
  cut.groups.resize(num_ranks / size);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t group = stride == 1 ? rank / size : rank % (num_ranks / size);
    cut.groups[group].push_back(rank);
  }
  if (size % 2 == 0 && random.next_below(2) == 0)
    cut.inner_size = random.next_below(2) == 0 ? 2 : size;
  return cut;
}

/// Cuts rows into the numbers of rows of a few matrices.
inline std::vector<int64_t> random_matrices(Random& random, int64_t rows) {
  std::vector<int64_t> matrices;
  while (rows > 0) {
    const auto most = static_cast<uint64_t>(std::min<int64_t>(rows, 12));
    matrices.push_back(static_cast<int64_t>(1 + random.next_below(most)));
    rows -= matrices.back();
  }
  return matrices;
}

/// Parameters of rank 1 and 2, some made of matrices, tiny ones, some with fewer rows than ranks or
/// none; several cuts.
inline SpreadModel random_model(Random& random) {
  SpreadModel model = {.num_ranks = static_cast<int64_t>(1 + random.next_below(5)),
                       .cuts = {},
                       .parameters = {},
                       .seed = random.next_u64()};
  const auto num_cuts = 1 + random.next_below(3);
  for (uint64_t c = 0; c < num_cuts; ++c)
    model.cuts.push_back(random_cut(random, fmt::format("cut{}", c), model.num_ranks));
  const auto num_parameters = random.next_below(9);
  const bool muon = random.next_below(2) == 0;
  for (uint64_t i = 0; i < num_parameters; ++i) {
    const auto rows = static_cast<int64_t>(random.next_below(random.next_below(3) == 0 ? 3 : 40));
    const auto columns =
        static_cast<int64_t>(1 + random.next_below(random.next_below(3) == 0 ? 300 : 20));
    model.parameters.push_back(
        {.name = fmt::format("p{}", i),
         .global = random.next_below(3) == 0 ? Shape{rows} : Shape{rows, columns},
         .dtype = random.next_below(2) == 0 ? DType::kF32 : DType::kBF16,
         .cut = random.next_below(num_cuts),
         .lr_multiplier = random.next_below(4) == 0 ? 0.5 : 1.0});
    SpreadParameter& last = model.parameters.back();
    if (muon && last.global.rank() == 2 && random.next_below(2) == 0)
      last.matrix_rows = random_matrices(random, rows);
  }
  return model;
}

/// Bitwise equality of the values of two tensors of one type and shape.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         (a.num_bytes() == 0 ||
          std::memcmp(a.data, b.data, static_cast<size_t>(a.num_bytes())) == 0);
}

/// The part of a global tensor that a slice names.
inline OwnedTensor part_of(const Tensor& whole, const Slice& slice) {
  OwnedTensor part(whole.dtype, slice.shape());
  copy_slice_from(slice, whole, part);
  return part;
}

}  // namespace tessera
