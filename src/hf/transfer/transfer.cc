#include "hf/transfer/transfer.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/memory.h"
#include "hf/tensors/packed_tensors.h"
#include "hf/transfer/elements.h"
#include "hf/transfer/scaled_matrices.h"

namespace tessera {
namespace {

constexpr int64_t kPieceBytes = int64_t{8} << 20;

class HfSource final : public ElementSource {
 public:
  HfSource(const TensorMap& map, const HfTensors& tensors, const std::optional<BlockScales>& blocks)
      : map_(map) {
    std::set<const SafetensorsReader*> files;
    for (const MappedTensor& tensor : map.hf) {
      tensors_.push_back(tensors.find(tensor.name));
      packed_.push_back(tensors_.back() == nullptr ? find_packed(tensors, tensor.name)
                                                   : std::nullopt);
      if (packed_.back()) {
        files.insert({packed_.back()->blocks->file, packed_.back()->scales->file});
        scaled_.emplace_back();
        continue;
      }
      files.insert(tensors_.back()->file);
      scaled_.push_back(find_scaled(tensors, tensor, blocks));
      if (scaled_.back()) files.insert(scaled_.back()->scales->file);
    }
    files_.assign(files.begin(), files.end());
  }
  DType dtype(size_t tensor) const override {
    const bool coded = packed_[tensor] || scaled_[tensor];
    return coded ? DType::kF32 : tensors_[tensor]->entry->dtype;
  }
  std::span<const std::byte> read(size_t tensor, int64_t begin, int64_t count) override {
    if (packed_[tensor]) {
      values_.resize(count);
      read_packed(*packed_[tensor], begin, values_);
      return std::as_bytes(std::span(values_));
    }
    if (scaled_[tensor]) {
      values_.resize(count);
      read_scaled(*scaled_[tensor], begin, values_);
      return std::as_bytes(std::span(values_));
    }
    const int64_t size = dtype_size(dtype(tensor));
    return tensors_[tensor]->bytes().subspan(begin * size, count * size);
  }
  const std::string& name(size_t tensor) const override { return map_.hf[tensor].name; }
  void drop_pages() override {
    for (const SafetensorsReader* file : files_) drop_mapped_pages(file->file_bytes());
  }

 private:
  const TensorMap& map_;
  std::vector<const HfTensor*> tensors_;
  std::vector<std::optional<ScaledMatrix>> scaled_;  // empty: the elements are the values
  std::vector<std::optional<PackedTensor>> packed_;
  std::vector<const SafetensorsReader*> files_;
  std::vector<float> values_;
};

class CheckpointSource final : public ElementSource {
 public:
  CheckpointSource(const TensorMap& map, const CheckpointReader& reader)
      : map_(map), reader_(reader) {}

  DType dtype(size_t tensor) const override {
    return reader_.manifest().tensors.at(map_.own[tensor].name).dtype;
  }
  std::span<const std::byte> read(size_t tensor, int64_t begin, int64_t count) override {
    const Shape& shape = map_.own[tensor].shape;
    Shape offset = shape;
    Shape part = shape;
    const int64_t row = shape.rank() == 2 ? shape[1] : 1;
    offset[0] = begin / row;
    part[0] = count / row;
    if (shape.rank() == 2) offset[1] = 0;
    const size_t num_bytes = count * dtype_size(dtype(tensor));
    buffer_.resize(std::max(buffer_.size(), num_bytes));
    reader_.load_part(map_.own[tensor].name, offset, {buffer_.data(), dtype(tensor), part});
    return std::span<const std::byte>(buffer_).first(num_bytes);
  }
  const std::string& name(size_t tensor) const override { return map_.own[tensor].name; }
  void drop_pages() override { reader_.drop_pages(); }

 private:
  const TensorMap& map_;
  const CheckpointReader& reader_;
  std::vector<std::byte> buffer_;
};

class HeldSource final : public ElementSource {
 public:
  HeldSource(const TensorMap& map, const HeldTensors& tensors) : map_(map) {
    for (const MappedTensor& tensor : map.own) {
      const auto found = tensors.find(tensor.name);
      ensure(found != tensors.end() && found->second.shape == tensor.shape,
             "'{}' of a model in memory", tensor.name);
      tensors_.push_back(found->second);
    }
  }
  DType dtype(size_t tensor) const override { return tensors_[tensor].dtype; }
  std::span<const std::byte> read(size_t tensor, int64_t begin, int64_t count) override {
    const int64_t size = dtype_size(dtype(tensor));
    return {static_cast<const std::byte*>(tensors_[tensor].data) + begin * size,
            static_cast<size_t>(count * size)};
  }
  const std::string& name(size_t tensor) const override { return map_.own[tensor].name; }
  void drop_pages() override {}

 private:
  const TensorMap& map_;
  std::vector<Tensor> tensors_;
};

void sort_blocks(Plan& plan) {
  for (auto& blocks : plan) std::ranges::sort(blocks, {}, &BlockCopy::target_begin);
}

/// One request at work.
class Transfer {
 public:
  Transfer(ElementSource& source, const TransferRequest& request,
           const std::function<void(std::span<const std::byte>)>& sink)
      : source_(source), request_(request), sink_(sink) {}

  void run() {
    int64_t position = 0;
    for (size_t i = 0; i < request_.blocks.size(); ++i) {
      const BlockCopy& block = request_.blocks[i];
      pad(block.target_begin - position);
      give_block(block, request_.dtypes[i]);
      position = block.target_begin + block.num_elements();
    }
    pad(request_.num_elements - position);
  }

 private:
  void pad(int64_t count) {
    if (!request_.pad) return;
    int64_t num_bytes = count * dtype_size(request_.padding_dtype);
    for (; num_bytes > 0; num_bytes -= kPieceBytes) {
      const size_t size = std::min(num_bytes, kPieceBytes);
      buffer_.assign(size, std::byte{0});
      sink_(buffer_);
    }
  }

  void give_block(const BlockCopy& block, DType to) {
    const DType from = source_.dtype(block.source);
    const int64_t step = std::max<int64_t>(1, kPieceBytes / (block.cols * dtype_size(to)));
    std::span<const std::byte> whole;
    if (block.transposed) {
      whole = source_.read(block.source, block.source_begin, block.num_elements());
      if (block.halves == Halves::kSplit) whole = split(whole, block.cols, block.rows, from);
    }
    for (int64_t row = 0; row < block.rows; row += step) {
      const int64_t count = std::min(step, block.rows - row);
      if (block.transposed) {
        std::byte* out = room(count * block.cols * dtype_size(to));
        transpose_columns({whole.data(), block.cols, block.rows, from}, row, count, out, to);
        give_arranged(block, count, to);
      } else {
        give_rows(block, row, count, to);
      }
    }
  }

  void give_rows(const BlockCopy& block, int64_t row, int64_t num_rows, DType to) {
    const DType from = source_.dtype(block.source);
    const int64_t count = num_rows * block.cols;
    const auto elements = source_.read(block.source, block.source_begin + row * block.cols, count);
    if (block.offset != 0) {
      add_offset(elements.data(), from, room(count * dtype_size(to)), to, count, block.offset);
      return give(block.source, buffer_, to);
    }
    const bool arranged = block.halves == Halves::kAsTheyAre;
    if (from == to && arranged) return give(block.source, elements, to);
    convert_elements(elements.data(), from, room(count * dtype_size(to)), to, count);
    if (block.halves == Halves::kSplit)
      return give(block.source, split(buffer_, num_rows, block.cols, to), to);
    give_arranged(block, num_rows, to);
  }

  /// The rows in `buffer_`, whose halves are put in turn where the target has them so.
  void give_arranged(const BlockCopy& block, int64_t num_rows, DType dtype) {
    if (block.halves != Halves::kInTurn) return give(block.source, buffer_, dtype);
    arranged_.resize(buffer_.size());
    alternate_halves(buffer_.data(), num_rows, block.cols, dtype, arranged_.data());
    give(block.source, arranged_, dtype);
  }

  std::span<const std::byte> split(std::span<const std::byte> elements, int64_t rows, int64_t cols,
                                   DType dtype) {
    arranged_.resize(elements.size());
    split_alternating(elements.data(), rows, cols, dtype, arranged_.data());
    return arranged_;
  }

  void give(size_t source, std::span<const std::byte> elements, DType dtype) {
    source_.count_transferred(source, elements, dtype);
    sink_(elements);
  }

  std::byte* room(int64_t num_bytes) {
    buffer_.resize(num_bytes);
    return buffer_.data();
  }

  ElementSource& source_;
  const TransferRequest& request_;
  const std::function<void(std::span<const std::byte>)>& sink_;
  std::vector<std::byte> buffer_;
  std::vector<std::byte> arranged_;  // rows with their halves elsewhere
};

}  // namespace

void judge_nonfinite(const NonFiniteTensors& found, std::string_view where, bool allowed,
                     std::vector<std::string>& notes) {
  if (found.empty()) return;
  const std::string text = fmt::format("{}: {}", where, found.describe());
  require(allowed, "{}, or too large for the type written; --allow-nonfinite takes it as it is",
          text);
  notes.push_back(text);
}

void PageKeeper::count(int64_t num_bytes) {
  constexpr int64_t kMostBytes = int64_t{128} << 20;
  num_bytes_ += num_bytes;
  if (num_bytes_ < kMostBytes) return;
  for (ElementSource* source : sources_) source->drop_pages();
  num_bytes_ = 0;
}

std::unique_ptr<ElementSource> make_hf_source(const TensorMap& map, const HfTensors& tensors,
                                              const std::optional<BlockScales>& scales) {
  return std::make_unique<HfSource>(map, tensors, scales);
}

std::unique_ptr<ElementSource> make_held_source(const TensorMap& map, const HeldTensors& tensors) {
  return std::make_unique<HeldSource>(map, tensors);
}

std::unique_ptr<ElementSource> make_checkpoint_source(const TensorMap& map,
                                                      const CheckpointReader& reader) {
  return std::make_unique<CheckpointSource>(map, reader);
}

Plan plan_to_own(const TensorMap& map) {
  Plan plan(map.own.size());
  for (const TensorLink& link : map.links) {
    plan[link.own].push_back({link.hf, link.hf_begin, link.own_begin, link.rows, link.cols,
                              link.transposed,
                              link.alternating ? Halves::kSplit : Halves::kAsTheyAre, link.offset});
  }
  sort_blocks(plan);
  return plan;
}

Plan plan_to_hf(const TensorMap& map) {
  Plan plan(map.hf.size());
  for (const TensorLink& link : map.links) {
    const int64_t rows = link.transposed ? link.cols : link.rows;
    const int64_t cols = link.transposed ? link.rows : link.cols;
    plan[link.hf].push_back({link.own, link.own_begin, link.hf_begin, rows, cols, link.transposed,
                             link.alternating ? Halves::kInTurn : Halves::kAsTheyAre,
                             -link.offset});
  }
  for (const auto& [copy, original] : map.copies) plan[copy] = plan[original];
  sort_blocks(plan);
  return plan;
}

void transfer_tensor(ElementSource& source, const TransferRequest& request,
                     const std::function<void(std::span<const std::byte>)>& sink) {
  Transfer(source, request, sink).run();
}

}  // namespace tessera
