#include "arrays.h"

#include <algorithm>
#include <limits>

#include "data/row_source.h"

namespace tessera::python {
namespace {

template <typename T>
void copy_rows(const IntArray& array, const char* name, Rows& rows) {
  const auto* data = static_cast<const T*>(array.data());
  const bool is_flat = array.ndim() == 1;
  const int64_t row_stride = is_flat ? 0 : array.stride(0);
  const int64_t stride = array.stride(is_flat ? 0 : 1);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    for (int64_t i = 0; i < rows.length; ++i) {
      const T value = data[row * row_stride + i * stride];
      require(std::in_range<int32_t>(value), "{}[{}, {}] is {}, beyond 32 bits", name, row, i,
              value);
      rows.values.push_back(static_cast<int32_t>(value));
    }
  }
}

template <typename Signed, typename Unsigned>
void copy_as(const IntArray& array, const char* name, Rows& rows) {
  if (array.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)) {
    copy_rows<Signed>(array, name, rows);
  } else {
    copy_rows<Unsigned>(array, name, rows);
  }
}

std::string describe_shape(const IntArray& array) {
  std::vector<size_t> shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

void require_shape(const Rows& rows, const Rows& tokens, const char* name) {
  require(rows.num_rows == tokens.num_rows && rows.length == tokens.length,
          "{} have the shape [{}, {}], but tokens [{}, {}]", name, rows.num_rows, rows.length,
          tokens.num_rows, tokens.length);
}

void require_ids(const Rows& rows, int64_t vocab_size, const char* name) {
  for (const int32_t id : rows.values) {
    const bool is_none = id == kNoLabel && std::string_view(name) == "labels";
    require(is_none || (id >= 0 && id < vocab_size),
            "{} hold the id {}, outside the model's vocabulary of {}{}", name, id, vocab_size,
            std::string_view(name) == "labels" ? " (-100 stands for no label)" : "");
  }
}

/// The mistake of those who come from transformers, which shifts labels itself.
void refuse_unshifted(const Rows& tokens, const Rows& labels) {
  bool differ_within = false;
  for (int64_t i = 0; i < std::ssize(tokens.values); ++i) {
    if (labels.values[i] != kNoLabel && labels.values[i] != tokens.values[i]) return;
    differ_within = differ_within || tokens.values[i] != tokens.values[0];
  }
  const bool has_any =
      std::ranges::any_of(labels.values, [](int32_t id) { return id != kNoLabel; });
  require(
      !differ_within || !has_any,
      "labels are the tokens themselves, so that the model would learn to repeat its input: "
      "labels[b, t] is the token that follows tokens[b, t], or -100. Leave labels out to predict "
      "each row's next tokens");
}

Rows take_columns(const Rows& rows, int64_t first, int64_t count) {
  Rows part{rows.num_rows, count, {}};
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const auto from = rows.row(row).subspan(first, count);
    part.values.insert(part.values.end(), from.begin(), from.end());
  }
  return part;
}

/// Labels are a document's own: none at its last token.
void cut_labels(const Rows& documents, const Rows* next, Rows& labels) {
  for (int64_t row = 0; row < labels.num_rows; ++row) {
    for (int64_t i = 0; i < labels.length; ++i) {
      const int32_t own = documents.row(row)[i];
      const bool is_last = i + 1 == labels.length;
      if (is_last && next == nullptr) continue;
      const int32_t other = is_last ? next->row(row)[0] : documents.row(row)[i + 1];
      if (own != other) labels.values[row * labels.length + i] = kNoLabel;
    }
  }
}

/// FP8 is given as its bits, which few know to read.
nb::dlpack::dtype_code dtype_code(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kF64:
    case DType::kF16:
      return nb::dlpack::dtype_code::Float;
    case DType::kBF16:
      return nb::dlpack::dtype_code::Bfloat;
    case DType::kI32:
    case DType::kI64:
      return nb::dlpack::dtype_code::Int;
    default:
      return nb::dlpack::dtype_code::UInt;
  }
}

}  // namespace

Rows read_rows(const IntArray& array, const char* name) {
  require(array.device_type() == nb::device::cpu::value,
          "{} are not in the host's memory; move them there (.cpu())", name);
  require(array.ndim() == 1 || array.ndim() == 2,
          "{} have the shape {}; expected [sequences, tokens]", name, describe_shape(array));
  const auto dtype = array.dtype();
  require((dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int) ||
           dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)) &&
              dtype.lanes == 1,
          "{} are no whole numbers; expected an array of int64, int32, uint16 or the like", name);
  Rows rows{array.ndim() == 1 ? 1 : static_cast<int64_t>(array.shape(0)),
            static_cast<int64_t>(array.shape(array.ndim() - 1)),
            {}};
  rows.values.reserve(rows.num_rows * rows.length);
  switch (dtype.bits) {
    case 8:
      copy_as<int8_t, uint8_t>(array, name, rows);
      break;
    case 16:
      copy_as<int16_t, uint16_t>(array, name, rows);
      break;
    case 32:
      copy_as<int32_t, uint32_t>(array, name, rows);
      break;
    default:
      copy_as<int64_t, uint64_t>(array, name, rows);
      break;
  }
  return rows;
}

TokenRows read_tokens(const TokenArrays& arrays, int64_t vocab_size) {
  TokenRows rows{.tokens = read_rows(arrays.tokens, "tokens"), .labels = {}, .documents = {}};
  require_ids(rows.tokens, vocab_size, "tokens");
  if (arrays.documents) {
    rows.documents = read_rows(*arrays.documents, "documents");
    require_shape(*rows.documents, rows.tokens, "documents");
  }
  if (arrays.labels) {
    rows.labels = read_rows(*arrays.labels, "labels");
    require_shape(rows.labels, rows.tokens, "labels");
    require_ids(rows.labels, vocab_size, "labels");
    refuse_unshifted(rows.tokens, rows.labels);
    if (rows.documents) cut_labels(*rows.documents, nullptr, rows.labels);
    require(rows.tokens.num_rows > 0 && rows.tokens.length > 0, "there are no tokens");
    return rows;
  }
  const int64_t length = rows.tokens.length - 1;
  require(
      rows.tokens.num_rows > 0 && length > 0,
      "tokens have the shape [{}, {}]; without labels a row takes at least two tokens, of which "
      "each is predicted from those before it",
      rows.tokens.num_rows, rows.tokens.length);
  rows.labels = take_columns(rows.tokens, 1, length);
  rows.tokens = take_columns(rows.tokens, 0, length);
  if (rows.documents) {
    const Rows last = take_columns(*rows.documents, length, 1);
    rows.documents = take_columns(*rows.documents, 0, length);
    cut_labels(*rows.documents, &last, rows.labels);
  }
  return rows;
}

Batch make_batch(const TokenRows& rows, int64_t first, int64_t count) {
  Batch batch;
  const int64_t length = rows.tokens.length;
  batch.cu_seqlens.push_back(0);
  for (int64_t row = first; row < first + count; ++row) {
    const auto tokens = rows.tokens.row(row);
    const auto labels = rows.labels.row(row);
    batch.tokens.insert(batch.tokens.end(), tokens.begin(), tokens.end());
    batch.labels.insert(batch.labels.end(), labels.begin(), labels.end());
    int32_t position = 0;
    for (int64_t i = 0; i < length; ++i) {
      batch.positions.push_back(position++);
      const bool ends = i + 1 == length || (rows.documents && rows.documents->row(row)[i] !=
                                                                  rows.documents->row(row)[i + 1]);
      if (!ends) continue;
      batch.cu_seqlens.push_back(static_cast<int32_t>((row - first) * length + i + 1));
      position = 0;
    }
  }
  batch.num_valid = std::ranges::count_if(batch.labels, [](int32_t id) { return id != kNoLabel; });
  return batch;
}

SharedArray share(const Tensor& tensor, nb::handle owner) {
  std::vector<size_t> shape(tensor.shape.dims().begin(), tensor.shape.dims().end());
  const nb::dlpack::dtype dtype{static_cast<uint8_t>(dtype_code(tensor.dtype)),
                                static_cast<uint8_t>(8 * dtype_size(tensor.dtype)), 1};
  const int device = tensor.device == nullptr ? nb::device::cpu::value : nb::device::cuda::value;
  return {tensor.data, shape.size(), shape.data(), owner, nullptr, dtype, device, 0};
}

}  // namespace tessera::python
