#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/testing.h"
#include "comm/thread/thread_world.h"
#include "core/random.h"
#include "core/slice.h"

namespace tessera {

/// A random way of spreading tensors over ranks: rank r holds held[r] of them, of which the parts
/// in owned[r] are its own, so that every element is owned once.
class Slicing {
 public:
  struct Item {
    std::string name;
    Slice slice;
  };

  Slicing(int64_t num_ranks, const std::vector<NamedTensor>& tensors, uint64_t seed)
      : num_ranks_(num_ranks), held_(num_ranks), owned_(held_.size()), random_(seed, 0) {
    for (const auto& [name, tensor] : tensors) spread(name, tensor.shape);
  }

  int64_t num_ranks() const { return num_ranks_; }
  const std::vector<Item>& held(int64_t rank) const { return held_[rank]; }
  const std::vector<Item>& owned(int64_t rank) const { return owned_[rank]; }

 private:
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(random_.next_below(static_cast<uint64_t>(bound)));
  }

  void hold(int64_t rank, const std::string& name, const Slice& slice) {
    held_[rank].push_back({name, slice});
  }
  void own(int64_t rank, const std::string& name, const Slice& slice) {
    owned_[rank].push_back({name, slice});
  }
  void give(int64_t rank, const std::string& name, const Slice& slice) {
    hold(rank, name, slice);
    own(rank, name, slice);
  }

  /// `total` cut into ranges, some perhaps empty.
  std::vector<IndexRange> cut(int64_t total, int64_t num_parts) {
    std::vector<int64_t> ends;
    for (int64_t i = 1; i < num_parts; ++i) ends.push_back(below(total + 1));
    ends.push_back(total);
    std::ranges::sort(ends);
    std::vector<IndexRange> ranges;
    int64_t begin = 0;
    for (const int64_t end : ends) {
      ranges.push_back({begin, end - begin});
      begin = end;
    }
    return ranges;
  }

  void spread(const std::string& name, const Shape& shape) {
    switch (below(shape.rank() == 2 ? 8 : 5)) {
      case 0:
        return give(below(num_ranks_), name, Slice::whole(shape));
      case 1:
        return replicate(name, shape);
      case 2:
        return spread_rows(name, shape);
      case 3:
        return spread_blocks(name, shape);
      case 4:
        return spread_halves(name, shape);
      case 5:
        return spread_columns(name, shape);
      case 6:
        return spread_experts(name, shape);
      default:
        return spread_twice(name, shape);
    }
  }

  /// All hold it, one owns it.
  void replicate(const std::string& name, const Shape& shape) {
    for (int64_t rank = 0; rank < num_ranks_; ++rank) hold(rank, name, Slice::whole(shape));
    own(below(num_ranks_), name, Slice::whole(shape));
  }

  void spread_rows(const std::string& name, const Shape& shape) {
    const auto ranges = cut(shape[0], num_ranks_);
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      give(rank, name, Slice::of_rows(shape, {ranges[rank]}));
    }
  }

  /// Several ranges a rank, in any order.
  void spread_blocks(const std::string& name, const Shape& shape) {
    std::vector<std::vector<IndexRange>> rows(held_.size());
    for (const IndexRange& range : cut(shape[0], 3 * num_ranks_)) {
      auto& own = rows[below(num_ranks_)];
      own.insert(own.begin() + below(std::ssize(own) + 1), range);
    }
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      give(rank, name, Slice::of_rows(shape, rows[rank]));
    }
  }

  /// As gate and up: of each half a range, given as two slices by some.
  void spread_halves(const std::string& name, const Shape& shape) {
    const int64_t half = shape[0] / 2;
    const auto first = cut(half, num_ranks_);
    auto second = cut(shape[0] - half, num_ranks_);
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      second[rank].begin += half;
      hold(rank, name, Slice::of_rows(shape, {first[rank], second[rank]}));
      if (rank % 2 == 0) {
        own(rank, name, Slice::of_rows(shape, {first[rank], second[rank]}));
      } else {
        own(rank, name, Slice::of_rows(shape, {first[rank]}));
        own(rank, name, Slice::of_rows(shape, {second[rank]}));
      }
    }
  }

  void spread_columns(const std::string& name, const Shape& shape) {
    const auto ranges = cut(shape[1], num_ranks_);
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      give(rank, name, Slice::of_columns(shape, ranges[rank]));
    }
  }

  /// The largest divisor of the number of ranks that is at most a random number.
  int64_t random_divisor() {
    int64_t divisor = 1 + below(num_ranks_);
    while (num_ranks_ % divisor != 0) --divisor;
    return divisor;
  }

  /// Experts of `inner` rows: ranges of experts over one axis, of each expert's rows over the
  /// other.
  void spread_experts(const std::string& name, const Shape& shape) {
    const int64_t inner = shape[0] % 4 == 0 ? 4 : 1;
    const int64_t num_groups = random_divisor();
    const int64_t num_parts = num_ranks_ / num_groups;
    const auto experts = cut(shape[0] / inner, num_groups);
    const auto parts = cut(inner, num_parts);
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      const IndexRange& own = experts[rank / num_parts];
      const IndexRange& part = parts[rank % num_parts];
      std::vector<IndexRange> rows;
      for (int64_t expert = own.begin; expert < own.end(); ++expert) {
        rows.push_back({expert * inner + part.begin, part.count});
      }
      give(rank, name, Slice::of_rows(shape, rows));
    }
  }

  /// Columns over one axis, held by all of the other, which share the rows of what they own.
  void spread_twice(const std::string& name, const Shape& shape) {
    const int64_t num_groups = random_divisor();
    const int64_t num_shares = num_ranks_ / num_groups;
    const auto columns = cut(shape[1], num_groups);
    for (int64_t group = 0; group < num_groups; ++group) {
      const Slice held = Slice::of_columns(shape, columns[group]);
      const auto shares = cut(held.num_rows(), num_shares);
      for (int64_t share = 0; share < num_shares; ++share) {
        const int64_t rank = group * num_shares + share;
        const IndexRange& rows = shares[share];
        hold(rank, name, held);
        own(rank, name, held.take_rows(rows.begin, rows.count));
      }
    }
  }

  int64_t num_ranks_;
  std::vector<std::vector<Item>> held_;
  std::vector<std::vector<Item>> owned_;
  Random random_;
};

/// A rank's tensors in memory of their own.
class LocalSlices {
 public:
  LocalSlices(const std::vector<Slicing::Item>& items, const std::vector<NamedTensor>& tensors) {
    for (const Slicing::Item& item : items) {
      const Tensor whole = std::ranges::find(tensors, item.name, &NamedTensor::name)->tensor;
      owned_.emplace_back(whole.dtype, item.slice.shape());
      named_.push_back({item.name, owned_.back(), item.slice});
      wholes_.push_back(whole);
    }
  }

  const std::vector<NamedSlice>& named() const { return named_; }
  void fill() const {
    for (size_t i = 0; i < named_.size(); ++i) {
      copy_slice_from(named_[i].slice, wholes_[i], named_[i].tensor);
    }
  }
  /// They are parts of the whole tensors.
  void expect_filled() const {
    for (size_t i = 0; i < named_.size(); ++i) {
      const NamedSlice& own = named_[i];
      const OwnedTensor expected(own.tensor.dtype, own.tensor.shape);
      copy_slice_from(own.slice, wholes_[i], expected);
      EXPECT_TRUE(same_bits(own.tensor, expected)) << own.name << " " << own.slice.to_string();
    }
  }

 private:
  std::vector<OwnedTensor> owned_;
  std::vector<NamedSlice> named_;
  std::vector<Tensor> wholes_;
};

/// The items of tensors that are in the list.
inline std::vector<Slicing::Item> select(const std::vector<Slicing::Item>& items,
                                         const std::vector<NamedTensor>& tensors) {
  std::vector<Slicing::Item> selected;
  for (const Slicing::Item& item : items) {
    if (std::ranges::find(tensors, item.name, &NamedTensor::name) != tensors.end()) {
      selected.push_back(item);
    }
  }
  return selected;
}

inline std::vector<GlobalTensor> list_global(const std::vector<NamedTensor>& tensors) {
  std::vector<GlobalTensor> list;
  for (const auto& [name, tensor] : tensors) list.push_back({name, tensor.shape});
  return list;
}

/// All tensors of a group of a checkpoint, in memory.
class LoadedGroup {
 public:
  LoadedGroup(const CheckpointReader& reader, TensorGroup group) {
    for (const std::string& name : reader.names(group)) {
      const TensorRecord& record = reader.manifest().tensors.at(name);
      owned_.emplace_back(record.dtype, record.shape);
      named_.push_back({name, owned_.back()});
    }
    reader.load_group(group, named_);
  }
  const std::vector<NamedTensor>& named() const { return named_; }

 private:
  std::vector<OwnedTensor> owned_;
  std::vector<NamedTensor> named_;
};

/// Saves a checkpoint again into `root`, as ranks with a random slicing would have.
inline std::filesystem::path save_sliced(const std::filesystem::path& folder,
                                         const std::filesystem::path& root, int64_t num_ranks,
                                         uint64_t seed) {
  const CheckpointReader reader(folder);
  const LoadedGroup model(reader, TensorGroup::kModel);
  const LoadedGroup optimizer(reader, TensorGroup::kOptimizer);
  std::vector<NamedTensor> all = model.named();
  all.insert(all.end(), optimizer.named().begin(), optimizer.named().end());
  const Slicing slicing(num_ranks, all, seed);
  run_thread_world(num_ranks, [&](World& world) {
    const auto& items = slicing.owned(world.rank());
    const LocalSlices own_model(select(items, model.named()), model.named());
    const LocalSlices own_optimizer(select(items, optimizer.named()), optimizer.named());
    own_model.fill();
    own_optimizer.fill();
    save_checkpoint(root,
                    {.step = reader.step(),
                     .model = own_model.named(),
                     .optimizer = own_optimizer.named(),
                     .state = reader.state(),
                     .shard_bytes = 20'000},
                    *world.make_world_group());
  });
  const std::filesystem::path sliced = find_latest(root).path.value();
  if (path_exists(folder / "huggingface")) {
    std::filesystem::copy(folder / "huggingface", sliced / "huggingface");
  }
  return sliced;
}

}  // namespace tessera
