#include "ops/scaled_rows.h"

#include "ops/operator.h"

namespace tessera {

bool has_scaled_rows(const Format& format) {
  const ScaleLayout& scale = format.scale;
  const bool of_rows = scale.kind == ScaleLayout::Kind::kRow ||
                       (scale.kind == ScaleLayout::Kind::kBlock && scale.rows == 1);
  return of_rows && (format.element == DType::kE4M3 || format.element == DType::kE5M2);
}

bool takes_scaled_rows(const Format& format) {
  return is_unscaled(format) || has_scaled_rows(format);
}

Tensor elements_of(const Tensor& rows) {
  Tensor elements = rows;
  elements.scale = {};
  return elements;
}

Tensor row_scales_of(const Tensor& rows) {
  ensure(has_scaled_rows({rows.dtype, rows.scale}), "{} with scales '{}' has none of its rows",
         dtype_name(rows.dtype), rows.scale.to_string());
  return scales_of(rows);
}

int64_t columns_of_scale(const ScaleLayout& scale, int64_t num_columns) {
  return scale.kind == ScaleLayout::Kind::kBlock ? scale.columns : num_columns;
}

}  // namespace tessera
