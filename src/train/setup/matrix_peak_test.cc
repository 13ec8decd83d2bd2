#include "train/setup/matrix_peak.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

/// Gives the measurements in turn and counts them.
struct Measurements {
  std::vector<double> rates;
  size_t count = 0;

  MatrixPeak::Measure measure() {
    return [this] { return rates.at(count++); };
  }
};

TEST(MatrixPeak, SlowerStepsAreComparedWithWhatWasMeasured) {
  Measurements none;
  MatrixPeak peak(100, none.measure());
  EXPECT_DOUBLE_EQ(peak.share_of(25), 0.25);
  EXPECT_DOUBLE_EQ(peak.share_of(100), 1.0);
  EXPECT_EQ(none.count, 0);
}

TEST(MatrixPeak, AStepThatBeatsItHasItMeasuredAgain) {
  Measurements again{{160}};
  MatrixPeak peak(80, again.measure());
  EXPECT_DOUBLE_EQ(peak.share_of(120), 0.75);
  EXPECT_DOUBLE_EQ(peak.value(), 160);
  EXPECT_DOUBLE_EQ(peak.share_of(40), 0.25);
  EXPECT_EQ(again.count, 1);
}

TEST(MatrixPeak, IsAtLeastTheBestStep) {
  Measurements low{{70}};
  MatrixPeak peak(80, low.measure());
  EXPECT_DOUBLE_EQ(peak.share_of(120), 1.0);
  EXPECT_DOUBLE_EQ(peak.value(), 120);
  EXPECT_DOUBLE_EQ(peak.share_of(60), 0.5);
}

TEST(MatrixPeak, NeitherALowerMeasurementNorASlowStepLowersIt) {
  Measurements low{{10}};
  MatrixPeak peak(100, low.measure());
  peak.share_of(101);
  peak.share_of(1);
  EXPECT_DOUBLE_EQ(peak.value(), 101);
}

TEST(MatrixPeak, IsMeasuredAgainAFewTimesOnlyAndNoShareIsAboveOne) {
  Measurements low{std::vector<double>(100, 1.0)};
  MatrixPeak peak(1, low.measure());
  for (int rate = 2; rate < 90; ++rate) EXPECT_DOUBLE_EQ(peak.share_of(rate), 1.0);
  EXPECT_EQ(low.count, MatrixPeak::kMaxMeasurements);
}

TEST(MatrixPeak, NeedsNoSecondMeasurement) {
  MatrixPeak peak(100);
  EXPECT_DOUBLE_EQ(peak.share_of(200), 1.0);
  EXPECT_DOUBLE_EQ(peak.share_of(100), 0.5);
}

TEST(MatrixPeak, RefusesARateThatIsNone) {
  EXPECT_THROW(MatrixPeak(0), InternalError);
}

TEST(MeasureMatrixPeak, IsARateInBothTypesAndWithLittleMemory) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    EXPECT_GT(measure_matrix_peak(dtype), 1e6);
    EXPECT_GT(MatrixPeakMeter(dtype).measure(), 1e6);
  }
}

}  // namespace
}  // namespace tessera
