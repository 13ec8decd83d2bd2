#include "hf/merged_adapters.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"
#include "hf/adapter_parts.h"
#include "hf/transfer/elements.h"

namespace tessera {
namespace {

/// The matrices of adapters, wherever they are.
struct AdapterMatrices {
  std::string where;  ///< for messages
  std::function<std::optional<Shape>(const std::string& name)> find;
  /// Rows from `first` on, as F32.
  std::function<void(const std::string& name, int64_t first, const Tensor& out)> load;
};

class MergedSource final : public ElementSource {
 public:
  MergedSource(const TensorMap& map, std::unique_ptr<ElementSource> plain, AdapterMatrices matrices,
               const ModelConfig& model)
      : map_(map),
        matrices_(std::move(matrices)),
        plain_(std::move(plain)),
        rank_(model.lora.rank),
        scale_(static_cast<float>(model.lora.scale())) {
    for (const MappedTensor& tensor : map.own) {
      adapters_.push_back(find_adapter(model, tensor));
      if (adapters_.back()) check(tensor, *adapters_.back());
    }
  }

  DType dtype(size_t tensor) const override {
    return adapters_[tensor] ? DType::kF32 : plain_->dtype(tensor);
  }
  const std::string& name(size_t tensor) const override { return plain_->name(tensor); }
  void drop_pages() override { plain_->drop_pages(); }

  std::span<const std::byte> read(size_t tensor, int64_t begin, int64_t count) override {
    const std::span<const std::byte> base = plain_->read(tensor, begin, count);
    if (!adapters_[tensor]) return base;
    values_.resize(count);
    const auto values = std::as_writable_bytes(std::span(values_));
    convert_elements(base.data(), plain_->dtype(tensor), values.data(), DType::kF32, count);
    const int64_t width = map_.own[tensor].shape[1];
    add(tensor, begin / width, count / width);
    return std::as_bytes(std::span<const float>(values_));
  }

 private:
  void check(const MappedTensor& tensor, const AdapterParts& adapter) const {
    const auto check_shape = [&](const std::string& name, const Shape& expected) {
      const std::optional<Shape> found = matrices_.find(name);
      require(found == expected,
              "{}: adapter matrix '{}' is {}, expected {}, as lora.rank {} has it", matrices_.where,
              name, found ? found->to_string() : "missing", expected.to_string(), rank_);
    };
    check_shape(adapter.rows, {tensor.shape[0], rank_});
    check_shape(adapter.columns, {adapter.num_blocks() * rank_, tensor.shape[1]});
  }

  /// Part of an adapter's matrix, from row `first` on.
  std::vector<float> load(const std::string& name, int64_t first, int64_t rows,
                          int64_t columns) const {
    std::vector<float> values(rows * columns);
    matrices_.load(name, first, view(std::span(values), {rows, columns}));
    return values;
  }

  /// Adds to rows of a weight, which are in values_, what its adapter makes of them.
  void add(size_t tensor, int64_t first, int64_t count) {
    const AdapterParts& adapter = *adapters_[tensor];
    const int64_t width = map_.own[tensor].shape[1];
    const std::vector<float> rows = load(adapter.rows, first, count, rank_);
    for (int64_t block = 0; block < adapter.num_blocks(); ++block) {
      const int64_t begin = std::max(adapter.block_begin[block], first);
      const int64_t end = std::min(adapter.block_begin[block + 1], first + count);
      if (begin >= end) continue;
      const std::vector<float> columns = load(adapter.columns, block * rank_, rank_, width);
#pragma omp parallel for schedule(static)
      for (int64_t row = begin; row < end; ++row)
        add_row(rows.data() + (row - first) * rank_, columns.data(),
                std::span(values_).subspan((row - first) * width, width));
    }
  }

  void add_row(const float* row, const float* columns, std::span<float> to) const {
    std::vector<float> sum(to.size());
    for (int64_t k = 0; k < rank_; ++k) {
      const float* const from = columns + k * std::ssize(to);
      for (size_t i = 0; i < to.size(); ++i) sum[i] += row[k] * from[i];
    }
    for (size_t i = 0; i < to.size(); ++i) to[i] += scale_ * sum[i];
  }

  const TensorMap& map_;
  AdapterMatrices matrices_;
  std::unique_ptr<ElementSource> plain_;
  int64_t rank_;
  float scale_;
  std::vector<std::optional<AdapterParts>> adapters_;  // by tensor
  std::vector<float> values_;
};

AdapterMatrices matrices_of(const CheckpointReader& reader) {
  const auto find = [&reader](const std::string& name) -> std::optional<Shape> {
    const auto& tensors = reader.manifest().tensors;
    const auto found = tensors.find(name);
    if (found == tensors.end()) return std::nullopt;
    return found->second.shape;
  };
  const auto load = [&reader](const std::string& name, int64_t first, const Tensor& out) {
    reader.load_part(name, {first, 0}, out, Conversion::kFloats);
  };
  return {reader.path().string(), find, load};
}

AdapterMatrices matrices_of(const HeldTensors& tensors) {
  const auto find = [&tensors](const std::string& name) -> std::optional<Shape> {
    const auto found = tensors.find(name);
    if (found == tensors.end()) return std::nullopt;
    return found->second.shape;
  };
  const auto load = [&tensors](const std::string& name, int64_t first, const Tensor& out) {
    const Tensor& from = tensors.at(name);
    const int64_t begin = first * from.shape[1] * dtype_size(from.dtype);
    convert_elements(static_cast<const std::byte*>(from.data) + begin, from.dtype,
                     static_cast<std::byte*>(out.data), DType::kF32, out.num_elements());
  };
  return {"the model in memory", find, load};
}

}  // namespace

std::unique_ptr<ElementSource> make_merged_source(const TensorMap& map,
                                                  const CheckpointReader& reader,
                                                  const ModelConfig& model) {
  return std::make_unique<MergedSource>(map, make_checkpoint_source(map, reader),
                                        matrices_of(reader), model);
}

std::unique_ptr<ElementSource> make_merged_source(const TensorMap& map, const HeldTensors& tensors,
                                                  const ModelConfig& model) {
  return std::make_unique<MergedSource>(map, make_held_source(map, tensors), matrices_of(tensors),
                                        model);
}

}  // namespace tessera
