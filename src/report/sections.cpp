#include "report/sections.h"

#include <algorithm>
#include <numeric>

#include "base/shell_word.h"
#include "observe/progress_text.h"
#include "report/bar_charts.h"
#include "report/text.h"

namespace lockstep {

std::string NotRecorded::add(const std::string& what, const std::string& how) {
  for (auto& [names, same] : parts_)
    if (same == how) {
      names += ", " + what;
      return "";
    }
  parts_.emplace_back(what, how);
  return "";
}

std::string NotRecorded::line() const {
  std::string out;
  for (const auto& [names, how] : parts_) out += (out.empty() ? "" : "; ") + names + " (" + how + ")";
  return out.empty() ? "" : "<p class=\"missing\">" + html("Not recorded: " + out + ".") + "</p>\n";
}

namespace {

constexpr const char* kWatch = "log.watch(model)";
constexpr const char* kOnlyEvents = "event files do not contain it; the files of a lockstep::RunLog do";

// Widths of cards without their padding, in the page's three layouts (page_style.h).
constexpr double kWide = kWideChart.width, kWideFull = 1102, kMiddle = 640, kNarrow = 338;

struct Card {
  std::string title;
  std::string unit;
  std::string text;  ///< a sentence below the title
  bool full = false;
};

std::string card(const Card& card, const std::string& body) {
  std::string out = card.full ? "<section class=\"card full\"><h2>" : "<section class=\"card\"><h2>";
  out += html(card.title);
  if (!card.unit.empty()) out += "<small>" + html(card.unit) + "</small>";
  out += "</h2>";
  if (!card.text.empty()) out += "<p>" + html(card.text) + "</p>";
  return out + body + "</section>\n";
}

std::string in_all_layouts(const LineChart& chart) {
  return draw_line_chart(chart, kWideChart) + draw_line_chart(chart, {"middle", kMiddle, 280}) +
         draw_line_chart(chart, {"narrow", kNarrow, 230});
}

std::string key(const std::string& css, const std::string& text) {
  return "<li><span class=\"key " + css + "\"></span>" + html(text) + "</li>";
}

std::string legend_entry(int colour, const std::string& name, const std::string& value) {
  return "<li><span class=\"key c" + std::to_string(colour) + "\"></span>" + html(name) +
         (value.empty() ? "" : "<b>" + html(value) + "</b>") + "</li>";
}

/// Describes the pale band; empty if no line has one.
std::string smoothing_note(const LineChart& chart) {
  for (const ChartLine& line : chart.lines) {
    const double steps = smoothing_of(line, kWideChart).steps;
    if (steps > 0)
      return "Means of " + counted(static_cast<int64_t>(steps), "step") + "; the band shows minimum to maximum.";
  }
  return "";
}

std::string scalar_section(const ScalarChart& chart, const RunData& run) {
  const std::string drawing = in_all_layouts(chart.chart);
  if (drawing.empty())
    return card({chart.chart.title, "", ""}, "<p class=\"missing\">None of its values is a finite number.</p>");
  std::string legend = "<ul class=\"legend\">";
  for (size_t i = 0; i < chart.entries.size(); ++i) {
    const double last = smoothing_of(chart.chart.lines[i], kWideChart).last;
    legend += legend_entry(chart.entries[i].colour, chart.entries[i].name,
                           chart.chart.share ? short_number(100 * last) + " %" : short_number(last));
  }
  legend += "</ul>";
  std::string text = smoothing_note(chart.chart);
  if (run.start.world_size > 1 && chart.chart.title == "Loss")
    text += (text.empty() ? "As rank " : " As rank ") + std::to_string(run.ranks.front().rank) + " saw it.";
  return card({chart.chart.title, has_logarithmic_axis(chart.chart, kWideChart) ? "logarithmic" : "", text},
              legend + drawing);
}

}  // namespace

std::string scalar_sections(std::vector<ScalarChart>& charts, const RunData& run, NotRecorded& left_out) {
  std::string out;
  bool loss = false, accuracy = false;
  int count = 0;
  for (ScalarChart& chart : charts) {
    chart.chart.id = "chart" + std::to_string(++count);
    loss = loss || chart.chart.title.find("oss") != std::string::npos;
    accuracy = accuracy || chart.higher_is_better;
    out += scalar_section(chart, run);
  }
  if (!loss) left_out.add("loss", "log.step(samples, {{\"train/loss\", loss}})");
  if (!accuracy) left_out.add("accuracy", "log.scalar(\"valid/accuracy\", accuracy)");
  return out;
}

std::string throughput_section(const RunData& run, NotRecorded& left_out) {
  const Curve rate = throughput(run);
  if (rate.empty()) return left_out.add("throughput", run.ranks.empty() ? kOnlyEvents : "log.step(samples)");
  LineChart chart;
  chart.id = "throughput";
  chart.title = "Throughput";
  chart.epochs = run.epochs;
  chart.from_zero = true;
  chart.lines.push_back({"all ranks", 3, rate.points()});
  return card({"Throughput", "samples/s", "All ranks together, while they train."},
              "<ul class=\"legend\">" + legend_entry(3, "mean", with_thousands(mean_throughput(run))) + "</ul>" +
                  in_all_layouts(chart));
}

std::string communication_section(const RunData& run, NotRecorded& left_out) {
  LineChart chart = communication_chart(run);
  if (run.start.world_size == 1) return "";  // nobody to wait for
  if (!knows_communication(run)) return left_out.add("communication", run.ranks.empty() ? kOnlyEvents : kWatch);
  chart.id = "communication";
  std::string legend = "<ul class=\"legend\">";
  for (const ChartLine& line : chart.lines) {
    for (const RankData& rank : run.ranks)
      if (line.name == "rank " + std::to_string(rank.rank))
        legend += legend_entry(line.colour, line.name, percent(rank.communication_s / rank.seconds));
  }
  std::string text = "Share of a step in which a rank waits for the others";
  text += run.ranks.size() > chart.lines.size() ? ": the ranks that wait least and most." : ".";
  if (run.reductions.reductions > 0)
    text += " " + percent(run.reductions.overlap) + " of the communication time is hidden behind backward.";
  return card({"Communication", "", text}, legend + "</ul>" + in_all_layouts(chart));
}

std::string bucket_section(const RunData& run, NotRecorded& left_out) {
  const ReductionData& data = run.reductions;
  if (run.start.world_size == 1) return "";  // no gradients to reduce
  if (data.buckets.empty()) return left_out.add("buckets", run.ranks.empty() ? kOnlyEvents : kWatch);
  int64_t bytes = 0;
  for (const BucketTimes& bucket : data.buckets) bytes += bucket.bytes;
  std::string text = counted(static_cast<int64_t>(data.buckets.size()), "bucket") + ", " + byte_size(bytes) +
                     " of gradients per rank; median of " +
                     counted(static_cast<int64_t>(data.buckets.front().end_ms.size()), "step") + " recorded.";
  if (data.buckets.size() > kMostBucketsDrawn)
    text += " Only the first " + std::to_string(kMostBucketsDrawn) + " are drawn.";
  const std::string legend = "<ul class=\"legend\">" + key("thin arrive", "its gradients arrive") +
                             key("box queued", "ready, waits for its turn") + key("box reduce", "being reduced") +
                             key("box still", "this rank waits") + "</ul>";
  return card({"Buckets", "", text, true}, legend + draw_buckets(data, kWideFull, "wide") +
                                               draw_buckets(data, kMiddle, "middle") +
                                               draw_buckets(data, kNarrow, "narrow"));
}

std::string late_section(const RunData& run, NotRecorded& left_out) {
  const ReductionData& data = run.reductions;
  if (run.start.world_size == 1) return "";  // nobody to be late for
  const int64_t total = std::accumulate(data.times_last_by_rank.begin(), data.times_last_by_rank.end(), int64_t{0});
  if (total == 0) return left_out.add("late ranks", run.ranks.empty() ? kOnlyEvents : kWatch);
  const auto latest = std::max_element(data.times_last_by_rank.begin(), data.times_last_by_rank.end());
  const auto rank = static_cast<size_t>(latest - data.times_last_by_rank.begin());
  const double share = static_cast<double>(*latest) / static_cast<double>(total);
  double cost = 0;
  for (size_t r = 0; r < data.wait_ms_by_rank.size(); ++r)
    if (rank < data.wait_ms_by_rank.size()) cost = std::max(cost, data.wait_ms_by_rank[r] - data.wait_ms_by_rank[rank]);
  // As ReductionStats::reason.
  std::string text = share > 0.5 && cost > 0.01 * data.backward_ms
                         ? "Rank " + std::to_string(rank) + " was last in " + percent(share) +
                               " of the steps; others waited up to " + milliseconds(cost) + " per step for it."
                         : "No rank stands out.";
  text += " The rank that the others wait for waits least itself.";
  if (data.times_last_by_rank.size() > kMostRanksDrawn)
    text += " The " + std::to_string(kMostRanksDrawn) + " ranks that were last most often are drawn.";
  return card({"Late ranks", "", text}, draw_late_ranks(data, kWide, "wide") +
                                            draw_late_ranks(data, kMiddle, "middle") +
                                            draw_late_ranks(data, kNarrow, "narrow"));
}

std::string step_section(const std::map<int, TraceOfRank>& traces, const RunData& run, NotRecorded& left_out) {
  if (run.start.world_size == 1 || run.ranks.empty()) return "";
  const auto step = usual_step(traces);
  if (!step)
    return left_out.add("one step, rank by rank",
                        run.reductions.reductions > 0 ? "RunLogOptions::traced_reductions, on all ranks" : kWatch);
  std::string text = "Backward and buckets of reduction " + with_thousands(static_cast<double>(step->reduction)) +
                     ", the one of median length among those that were traced.";
  if (step->ranks.size() < static_cast<size_t>(run.start.world_size) || step->ranks.size() > kMostStepRanks)
    text += " " + std::to_string(std::min(step->ranks.size(), kMostStepRanks)) + " of " +
            std::to_string(run.start.world_size) + " ranks are drawn.";
  if (run.reductions.buckets.size() > kMostStepBuckets)
    text += " The first " + std::to_string(kMostStepBuckets) + " buckets are drawn.";
  text += " The whole trace is among the files below.";
  const std::string legend = "<ul class=\"legend\">" + key("box compute", "backward computes") +
                             key("box wait", "waits") + key("box reduce", "a bucket being reduced") + "</ul>";
  return card({"One step, rank by rank", "", text, true}, legend + draw_step(*step, kWideFull, "wide") +
                                                              draw_step(*step, kMiddle, "middle") +
                                                              draw_step(*step, kNarrow, "narrow"));
}

std::string starts_section(const RunData& run) {
  if (run.teams.size() < 2) return "";
  const EffectiveProgress progress = effective_progress(run.teams);
  int64_t failures = 0, resizes = 0, lost = 0;
  for (const TeamData& team : run.teams) {
    failures += team.culprit >= 0 ? 1 : 0;
    resizes += team.resized ? 1 : 0;
    lost += team.lost > 0 ? 1 : 0;
  }
  std::string text = counted(static_cast<int64_t>(run.teams.size()), "start") + ", " + counted(failures, "failure") +
                     ", " + counted(resizes, "change") + " of the number of ranks that was asked for.";
  if (progress.made > 0)
    text += " Effective progress: " + with_thousands(static_cast<double>(progress.kept)) + " of " +
            counted(progress.made, "step") + " made were kept, " + percent(progress.share()) + ".";
  std::string legend = "<ul class=\"legend\">" + key("box compute", "ranks that train");
  if (lost > 0) legend += key("box wait", "steps that were made again");
  if (failures > 0) legend += key("box late", "a failure");
  if (resizes > 0) legend += key("box ready", "another number was asked for");
  return card({"Starts", "ranks", text, true}, legend + "</ul>" + draw_starts(run.teams, kWideFull, "wide") +
                                                   draw_starts(run.teams, kMiddle, "middle") +
                                                   draw_starts(run.teams, kNarrow, "narrow"));
}

std::string system_section(const RunData& run, NotRecorded& left_out) {
  if (run.ranks.empty()) return left_out.add("system", kOnlyEvents);
  const StartData& start = run.start;
  std::string rows;
  const auto row = [&](const std::string& name, const std::string& value) {
    if (!value.empty() && value != "0") rows += "<tr><th>" + html(name) + "</th><td>" + html(value) + "</td></tr>";
  };
  row("Ranks", std::to_string(start.world_size) + (start.backend.empty() ? "" : ", " + start.backend));
  row("Threads per rank", std::to_string(start.threads));
  row("Host", start.host);
  row("CPU", start.cpu + (start.usable_cores > 0 ? ", " + counted(start.usable_cores, "usable core") : ""));
  row("Memory", start.memory_bytes > 0 ? byte_size(start.memory_bytes) : "");
  row("System", start.system);
  row("Kernel", start.kernel);
  std::string versions;
  for (const auto& [name, version] : start.versions) versions += (versions.empty() ? "" : ", ") + name + " " + version;
  row("Versions", versions);
  return card({"System", "", "As rank " + std::to_string(run.ranks.front().rank) + " found it."},
              "<table>" + rows + "</table>");
}

std::string command_section(const PageContent& content) {
  const StartData& start = content.run.start;
  std::string body, command;
  for (const std::string& word : start.command) command.append(command.empty() ? "" : " ").append(shell_word(word));
  if (!command.empty()) body += "<pre>" + html(command) + "</pre>";
  if (!start.folder.empty()) body += "<p>in " + html(start.folder) + "</p>";
  body += "<ul class=\"files\">";
  for (const LinkedFile& file : content.files)
    body += "<li><a href=\"" + html(url_path(file.path)) + "\">" + html(file.path) + "</a><span>" + html(file.what) +
            "</span></li>";
  body += "</ul>";
  std::string summaries;
  for (const auto& [what, count] : content.run.summaries)
    summaries += (summaries.empty() ? "" : ", ") + with_thousands(static_cast<double>(count)) + " " + what;
  if (!summaries.empty())
    body += "<p>The event files also hold " + html(summaries) + ": tensorboard --logdir " +
            html(shell_word(content.folder)) + "</p>";
  return card({command.empty() ? "Files" : "Command and files", ""}, body);
}

}  // namespace lockstep
