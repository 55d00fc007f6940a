#include "tools/plot_report.h"

#include <algorithm>
#include <cmath>
#include <regex>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json_number.h"
#include "ddp/config/report.h"

namespace ddp::tools {
namespace {

constexpr absl::string_view kLargest[] = {"acc",       "accuracy", "auc",    "auroc", "f1",
                                          "precision", "recall",   "r2",     "map",   "iou",
                                          "dice",      "bleu",     "reward", "psnr",  "ssim"};
constexpr absl::string_view kSmallest[] = {"loss", "perplexity", "error", "mse", "rmse",
                                           "mae",  "nll",        "wer",   "fid"};

using Row = std::vector<std::string>;

std::string Value(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return absl::StrFormat("%.6g", value);
}

// `value` less that of the first run; empty for the first run itself.
std::string Difference(double value, std::optional<double> first) {
  if (!first) return "";
  const double difference = value - *first;
  return std::isfinite(difference) ? absl::StrFormat("%+.6g", difference) : "-";
}

std::optional<bool> OrderOf(const std::string& tag, const BestOrders& orders) {
  const auto it = orders.find(tag);
  return it == orders.end() ? KnownOrder(tag) : std::optional<bool>(it->second);
}

std::optional<CurvePoint> BestOf(const Curve& curve, std::optional<bool> largest) {
  return largest ? curve.Best(*largest) : std::nullopt;
}

// One line of a terminal: tags and paths are a user's, and may have any bytes.
std::string Printable(absl::string_view text) {
  std::string printable;
  for (const char c : text)
    printable += absl::ascii_iscntrl(static_cast<unsigned char>(c)) ? '?' : c;
  return printable;
}

std::string ValuesTable(const std::vector<LoggedRun>& runs, const std::vector<std::string>& tags,
                        const BestOrders& orders) {
  const bool several = runs.size() > 1;
  std::vector<Row> rows = {several ? Row{"tag", "run", "last", "diff", "best", "at step", "diff"}
                                   : Row{"tag", "last", "at step", "best", "at step"}};
  for (const std::string& tag : tags) {
    const std::optional<bool> largest = OrderOf(tag, orders);
    std::optional<double> first_last, first_best;
    std::string title = Printable(tag);
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto it = runs[i].curves.find(tag);
      if (it == runs[i].curves.end()) continue;
      const CurvePoint& last = it->second.points.back();
      const std::optional<CurvePoint> best = BestOf(it->second, largest);
      const std::string best_value = best ? Value(best->value) : "-";
      const std::string best_step = best ? absl::StrCat(best->step) : "-";
      if (several) {
        rows.push_back({title, Printable(runs[i].name), Value(last.value),
                        Difference(last.value, first_last), best_value, best_step,
                        best ? Difference(best->value, first_best) : ""});
      } else {
        rows.push_back({title, Value(last.value), absl::StrCat(last.step), best_value, best_step});
      }
      title.clear();
      if (i == 0) {
        first_last = last.value;
        if (best) first_best = best->value;
      }
    }
  }
  return config::AlignedTable(rows);
}

}  // namespace

std::optional<bool> KnownOrder(absl::string_view tag) {
  const std::string name = absl::AsciiStrToLower(tag.substr(tag.rfind('/') + 1));
  // The last word that is known decides: "error_recall" is a recall.
  std::optional<bool> order;
  std::string word;
  for (size_t i = 0; i <= name.size(); ++i) {
    if (i < name.size() && absl::ascii_isalnum(static_cast<unsigned char>(name[i]))) {
      word += name[i];
      continue;
    }
    const auto is_word = [&](absl::string_view known) { return word == known; };
    if (std::any_of(std::begin(kLargest), std::end(kLargest), is_word)) order = true;
    if (std::any_of(std::begin(kSmallest), std::end(kSmallest), is_word)) order = false;
    word.clear();
  }
  return order;
}

absl::StatusOr<std::vector<std::string>> SelectTags(const std::vector<LoggedRun>& runs,
                                                    const std::string& pattern) {
  std::set<std::string> tags;
  try {
    const std::regex expression(pattern);
    for (const LoggedRun& run : runs) {
      for (const auto& [tag, curve] : run.curves) {
        if (pattern.empty() || std::regex_search(tag, expression)) tags.insert(tag);
      }
    }
  } catch (const std::regex_error& error) {
    return absl::InvalidArgumentError(absl::StrCat("is no regular expression: ", error.what()));
  }
  return std::vector<std::string>(tags.begin(), tags.end());
}

std::map<std::string, std::vector<std::string>> DifferingOptions(
    const std::vector<LoggedRun>& runs) {
  std::set<std::string> paths;
  for (const LoggedRun& run : runs) {
    for (const auto& [path, value] : run.options) paths.insert(path);
  }
  std::map<std::string, std::vector<std::string>> differing;
  for (const std::string& path : paths) {
    std::vector<std::string> values;
    for (const LoggedRun& run : runs) {
      const auto it = run.options.find(path);
      values.push_back(it == run.options.end() ? "-" : it->second);
    }
    if (std::set<std::string>(values.begin(), values.end()).size() > 1) {
      differing[path] = std::move(values);
    }
  }
  return differing;
}

std::string PlotTable(const std::vector<LoggedRun>& runs, const std::vector<std::string>& tags,
                      const BestOrders& orders) {
  std::string text = ValuesTable(runs, tags, orders);
  const auto differing = DifferingOptions(runs);
  if (differing.empty()) return text;
  std::vector<Row> rows = {{"run"}};
  for (const auto& [path, values] : differing) rows[0].push_back(Printable(path));
  for (size_t i = 0; i < runs.size(); ++i) {
    Row row = {Printable(runs[i].name)};
    for (const auto& [path, values] : differing) row.push_back(Printable(values[i]));
    rows.push_back(std::move(row));
  }
  return absl::StrCat(text, "\n", config::AlignedTable(rows));
}

nlohmann::ordered_json PlotJson(const std::vector<LoggedRun>& runs,
                                const std::vector<std::string>& tags, const BestOrders& orders) {
  using Json = nlohmann::ordered_json;
  Json all = {{"runs", Json::array()}, {"differing_options", Json::array()}};
  for (const auto& [path, values] : DifferingOptions(runs)) {
    all["differing_options"].push_back(path);
  }
  for (const LoggedRun& run : runs) {
    Json of_tags = Json::object();
    for (const std::string& tag : tags) {
      const auto it = run.curves.find(tag);
      if (it == run.curves.end()) continue;
      const Curve& curve = it->second;
      const std::optional<CurvePoint> best = BestOf(curve, OrderOf(tag, orders));
      of_tags[tag] = {{"last", ToJson(curve.points.back().value)},
                      {"last_step", curve.points.back().step},
                      {"best", best ? Json(best->value) : Json()},
                      {"best_step", best ? Json(best->step) : Json()},
                      {"points", curve.points.size()},
                      {"not_finite", curve.NotFinite()}};
    }
    all["runs"].push_back({{"name", run.name},
                           {"folder", run.folder},
                           {"options", run.options},
                           {"tags", std::move(of_tags)}});
  }
  return all;
}

}  // namespace ddp::tools
