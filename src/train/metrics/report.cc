#include "train/metrics/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/file/file.h"
#include "train/metrics/findings.h"
#include "train/metrics/jsonl.h"
#include "train/metrics/page.h"
#include "train/metrics/report_assets.h"
#include "train/metrics/report_data.h"

namespace tessera {
namespace {

constexpr std::array<std::pair<const char*, std::string RunInfo::*>, 8> kInfoFields = {
    {{"title", &RunInfo::title},
     {"started", &RunInfo::started},
     {"machine", &RunInfo::machine},
     {"tokenizer", &RunInfo::tokenizer},
     {"model_summary", &RunInfo::model_summary},
     {"config_text", &RunInfo::config_text},
     {"sample_prompt", &RunInfo::sample_prompt},
     {"sample_text", &RunInfo::sample_text}}};

std::string_view css_class(Severity severity) {
  switch (severity) {
    case Severity::kGood:
      return "good";
    case Severity::kInfo:
      return "info";
    case Severity::kWarning:
      return "warning";
    case Severity::kBad:
      return "bad";
  }
  return "info";
}

std::string cards_html(const RunHistory& history) {
  std::string html;
  for (const SummaryItem& item : summarise(history)) {
    html += fmt::format(
        "<div class=\"card\"><dt>{}</dt><dd>{}</dd><dd class=\"remark\">{}</dd></div>\n",
        escape_html(item.label), escape_html(item.value), escape_html(item.remark));
  }
  return html;
}

std::string findings_html(const RunHistory& history) {
  std::string html;
  for (const Finding& finding : find_findings(history)) {
    html += fmt::format("<li class=\"{}\">{}</li>\n", css_class(finding.severity),
                        escape_html(finding.text));
  }
  return html;
}

std::string sample_html(const RunInfo& info) {
  if (info.sample_text.empty()) return "";
  return fmt::format(
      "<section><h2>Generated text</h2><blockquote><b>{}</b>{}</blockquote></section>",
      escape_html(info.sample_prompt), escape_html(info.sample_text));
}

std::string details_html(std::string_view title, std::string_view text, bool open) {
  if (text.empty()) return "";
  return fmt::format("<details{}><summary>{}</summary><pre>{}</pre></details>\n",
                     open ? " open" : "", title, escape_html(text));
}

std::string about_html(const RunInfo& info) {
  const std::string html = details_html("Model", info.model_summary, true) +
                           details_html("Machine", info.machine, true) +
                           details_html("Tokenizer", info.tokenizer, true) +
                           details_html("Configuration", info.config_text, false);
  return html.empty() ? ""
                      : "<section class=\"about\"><h2>About this run</h2>" + html + "</section>";
}

std::string status_html(const RunHistory& history, const RunInfo& info) {
  std::vector<std::string> parts;
  if (!history.steps().empty()) {
    const StepRecord& last = history.steps().back();
    parts.push_back(last.step >= last.total_steps
                        ? fmt::format("finished after step {}", last.step)
                        : fmt::format("at step {} of {}", last.step, last.total_steps));
  }
  if (!info.started.empty()) parts.push_back("started " + info.started);
  return escape_html(fmt::format("{}", fmt::join(parts, " · ")));
}

std::filesystem::path info_path(const std::filesystem::path& run_folder) {
  return run_folder / "run.json";
}

}  // namespace

std::string make_report(const RunHistory& history, const RunInfo& info) {
  const std::string title = escape_html(info.title.empty() ? "Training run" : info.title);
  return fill_page(kPageHtml, {{"title", title},
                               {"style", std::string(kStyleCss)},
                               {"status", status_html(history, info)},
                               {"cards", cards_html(history)},
                               {"findings", findings_html(history)},
                               {"sample", sample_html(info)},
                               {"about", about_html(info)},
                               {"data", report_data_json(history)},
                               {"charts", std::string(kChartsJs)},
                               {"experts", std::string(kExpertsJs)},
                               {"main", std::string(kMainJs)}});
}

void save_run_info(const std::filesystem::path& run_folder, const RunInfo& info) {
  nlohmann::ordered_json json;
  for (const auto& [key, member] : kInfoFields) json[key] = valid_utf8(info.*member);
  replace_file(info_path(run_folder), json.dump(2) + '\n');
}

RunInfo load_run_info(const std::filesystem::path& run_folder) {
  const std::filesystem::path path = info_path(run_folder);
  RunInfo info;
  if (!std::filesystem::exists(path)) return info;
  const auto json =
      nlohmann::json::parse(read_text_file(path), nullptr, /*allow_exceptions=*/false);
  require(json.is_object(),
          "{} is damaged: a JSON object is expected; remove it to go on without it", path.string());
  for (const auto& [key, member] : kInfoFields) {
    if (!json.contains(key)) continue;
    require(json[key].is_string(), "{}: '{}' must be text, found {}", path.string(), key,
            json[key].type_name());
    info.*member = json[key].get<std::string>();
  }
  return info;
}

std::filesystem::path write_report_from_run(const std::filesystem::path& run_folder) {
  const std::filesystem::path metrics = run_folder / "metrics.jsonl";
  require(std::filesystem::is_regular_file(metrics),
          "{} is not the folder of a run: it has no metrics.jsonl", run_folder.string());
  RunHistory history;
  read_metrics(metrics, {[&](const StepRecord& record) { history.add(record); },
                         [&](const ValidationRecord& record) { history.add(record); }});
  const std::filesystem::path report = run_folder / "report.html";
  replace_file(report, make_report(history, load_run_info(run_folder)));
  return report;
}

}  // namespace tessera
