#pragma once

#include <string_view>

namespace tessera {

// The files of train/metrics/report, embedded when the program is built.
extern const std::string_view kPageHtml;
extern const std::string_view kStyleCss;
extern const std::string_view kChartsJs;
extern const std::string_view kExpertsJs;
extern const std::string_view kMainJs;
extern const std::string_view kStepHtml;
extern const std::string_view kStepJs;

}  // namespace tessera
