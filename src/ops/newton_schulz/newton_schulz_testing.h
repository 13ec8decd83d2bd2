#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::testing {

/// A matrix in double, row by row.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> at;
};

inline Matrix multiply(const Matrix& a, const Matrix& b) {
  Matrix c{a.rows, b.cols, std::vector<double>(a.rows * b.cols)};
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t k = 0; k < a.cols; ++k)
      for (int64_t j = 0; j < b.cols; ++j)
        c.at[i * b.cols + j] += a.at[i * a.cols + k] * b.at[k * b.cols + j];
  return c;
}

inline Matrix transpose(const Matrix& a) {
  Matrix result{a.cols, a.rows, std::vector<double>(a.at.size())};
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < a.cols; ++j) result.at[j * a.rows + i] = a.at[i * a.cols + j];
  return result;
}

inline double norm_of(const Matrix& x) {
  double squares = 0;
  for (const double value : x.at) squares += value * value;
  return std::sqrt(squares);
}

/// NewtonSchulz as the paper has it: X = a·X + (b·G + c·G²)·X with G = X·Xᵀ, of a wide matrix.
inline Matrix orthogonalize_plainly(Matrix x, int64_t steps) {
  if (x.rows > x.cols) return transpose(orthogonalize_plainly(transpose(x), steps));
  const double norm = norm_of(x);
  for (double& value : x.at) value /= norm + 1e-7;
  for (int64_t step = 0; step < steps; ++step) {
    Matrix gram = multiply(x, transpose(x));
    const Matrix square = multiply(gram, gram);
    for (size_t i = 0; i < gram.at.size(); ++i)
      gram.at[i] = -4.7750 * gram.at[i] + 2.0315 * square.at[i];
    const Matrix change = multiply(gram, x);
    for (size_t i = 0; i < x.at.size(); ++i) x.at[i] = 3.4445 * x.at[i] + change.at[i];
  }
  return x;
}

}  // namespace tessera::testing
