#include "report/page.h"

#include <algorithm>

#include "observe/progress_text.h"
#include "report/charts.h"
#include "report/page_script.h"
#include "report/page_style.h"
#include "report/sections.h"
#include "report/text.h"

namespace lockstep {
namespace {

constexpr const char* kPolicy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

std::string state_of(const RunData& run) {
  if (run.ranks.empty()) return "";
  const auto badge = [](const char* css, const char* text) {
    return std::string("<span class=\"state ") + css + "\">" + text + "</span>";
  };
  const auto any = [&](const char* how) {
    return std::any_of(run.ranks.begin(), run.ranks.end(), [&](const RankData& rank) { return rank.ended_by == how; });
  };
  if (any("exception")) return badge("bad", "ended by an exception");
  return any("") ? badge("bad", "still running, or cut off") : badge("good", "finished");
}

std::string header(const PageContent& content) {
  const RunData& run = content.run;
  std::string line;
  if (!run.ranks.empty()) {
    const RankData& first = run.ranks.front();
    line = "Began " + utc_time(first.begin_wall_s) + " \xc2\xb7 took " +
           time_taken(first.last_wall_s - first.begin_wall_s) + " \xc2\xb7 " + counted(run.start.world_size, "rank");
    if (!run.start.host.empty()) line += " on " + run.start.host;
    if (run.starts > 1)
      line += "; started " + std::to_string(run.starts) + " times, each time continuing from the one before";
  } else {
    line = "From TensorBoard's event files";
  }
  return "<header><h1>" + html(content.name) + "</h1>" + state_of(run) + "<p>" + html(line) + "</p></header>\n";
}

void add_tile(std::string& out, const std::string& what, const std::string& value, const std::string& more = "") {
  out += "<div class=\"tile\"><dt>" + html(what) + "</dt><dd>" + html(value) + "</dd>";
  if (!more.empty()) out += "<dd>" + html(more) + "</dd>";
  out += "</div>";
}

std::string tiles(const RunData& run, const std::vector<ScalarChart>& charts) {
  std::string out = "<dl class=\"tiles\">";
  const auto shown = [](const LineChart& chart, double value) {
    return chart.share ? short_number(100 * value) + " %" : short_number(value);
  };
  size_t count = 0;
  for (const ScalarChart& chart : charts) {
    if (chart.chart.title != "Loss" && !chart.higher_is_better) continue;
    for (size_t i = 0; i < chart.entries.size() && count < 4; ++i) {
      const ScalarChart::Entry& entry = chart.entries[i];
      if (chart.chart.lines[i].points.empty()) continue;
      const Smoothing smoothing = smoothing_of(chart.chart.lines[i], kWideChart);
      add_tile(out, entry.name == chart.chart.title ? entry.name : chart.chart.title + ", " + entry.name,
               shown(chart.chart, smoothing.last),
               smoothing.steps > 0 ? "mean of the last " + counted(static_cast<int64_t>(smoothing.steps), "step")
                                   : "best " + shown(chart.chart, entry.best));
      ++count;
    }
  }
  if (!run.ranks.empty()) {
    const RankData& first = run.ranks.front();
    if (mean_throughput(run) > 0) add_tile(out, "Throughput", with_thousands(mean_throughput(run)), "samples/s");
    if (run.start.world_size > 1 && knows_communication(run))
      add_tile(out, "Communication", percent(mean_communication_share(run)), "of the time of a step");
    add_tile(out, "Steps", with_thousands(static_cast<double>(first.last_step)),
             counted(static_cast<int64_t>(run.epochs.size()), "epoch"));
    if (const EffectiveProgress progress = effective_progress(run.teams); run.teams.size() > 1 && progress.made > 0)
      add_tile(out, "Steps kept", percent(progress.share()), "of those made");
    add_tile(out, "Training", minutes_and_seconds(first.seconds), "without evaluation");
  }
  return out == "<dl class=\"tiles\">" ? "" : out + "</dl>\n";
}

std::string notes(const RunData& run, const std::vector<ScalarChart>& charts) {
  std::vector<std::string> all = run.notes;
  for (const ScalarChart& chart : charts)
    for (const ScalarChart::Entry& entry : chart.entries)
      if (entry.not_finite > 0)
        all.push_back(chart.chart.title + ", " + entry.name + ": " + counted(entry.not_finite, "value") +
                      " NaN or infinite, the first at step " + with_thousands(entry.first_not_finite) +
                      "; the curve omits such values");
  if (all.empty()) return "";
  std::string out = "<div class=\"notes\"><strong>Notes</strong><ul>";
  for (const std::string& note : all) out += "<li>" + html(note) + "</li>";
  return out + "</ul></div>\n";
}

}  // namespace

std::string draw_page(const PageContent& content) {
  const RunData& run = content.run;
  std::vector<ScalarChart> charts = scalar_charts(run);
  std::string page =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"" +
      std::string(kPolicy) +
      "\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      html(content.name) + " \xe2\x80\x93 Lockstep</title>\n<style>" + kPageStyle +
      "</style>\n</head>\n<body>\n<main>\n";
  page += header(content);
  page += notes(run, charts);
  page += tiles(run, charts);
  page += "<div class=\"cards\">\n";
  NotRecorded left_out;
  page += scalar_sections(charts, run, left_out);
  page += throughput_section(run, left_out);
  page += communication_section(run, left_out);
  page += late_section(run, left_out);
  page += bucket_section(run, left_out);
  page += starts_section(run);
  page += step_section(content.traces, run, left_out);
  page += system_section(run, left_out);
  page += command_section(content);
  page += "</div>\n" + left_out.line() + "<footer>Drawn by <code>lockstep report</code> from the files in " +
          html(content.folder) +
          ". This page needs no network.</footer>\n</main>\n<div id=\"tip\" role=\"status\"></div>\n<script>" +
          kPageScript + "</script>\n</body>\n</html>\n";
  return page;
}

}  // namespace lockstep
