#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "base/atomic_file.h"
#include "observe/events/event_encoding.h"
#include "report/axis.h"
#include "report/charts.h"
#include "report/page.h"
#include "report/text.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

RunData read(const std::string& lines) {
  RunData run;
  std::istringstream in(lines);
  read_metrics(in, 0, run);
  return run;
}

std::string scalar(int step, const std::string& name, const std::string& value) {
  return R"({"type":"scalar","step":)" + std::to_string(step) + R"(,"epoch":0,"name":")" + name + R"(","value":)" +
         value + "}\n";
}
std::string run_line(int step, int world_size = 2) {
  return R"({"type":"run","step":)" + std::to_string(step) + R"(,"wall_s":1e9,"world_size":)" +
         std::to_string(world_size) + "}\n";
}

TEST(Curve, KeepsMeansAndExtremesOfMoreThanItHolds) {
  Curve curve;
  constexpr int kCount = 100'000;
  for (int i = 0; i < kCount; ++i) curve.add(i, i % 100);
  EXPECT_LE(curve.points().size(), Curve::kMostPoints);
  EXPECT_GT(curve.points().size(), Curve::kMostPoints / 4);
  EXPECT_EQ(curve.count(), kCount);
  double sum = 0, last = -1;
  int64_t count = 0;
  for (const Curve::Point& point : curve.points()) {
    sum += point.mean * static_cast<double>(point.count);
    count += point.count;
    EXPECT_LT(last, point.x);
    last = point.x;
  }
  EXPECT_EQ(count, kCount);
  EXPECT_NEAR(sum / kCount, 49.5, 1e-9);
  EXPECT_EQ(curve.points().back().last, 99);
}

std::vector<TeamData> starts(const std::string& lines, int64_t left_out = 0) {
  std::vector<TeamData> teams;
  std::istringstream in(lines);
  EXPECT_EQ(read_starts(in, teams), left_out);
  return teams;
}

std::string start_line(int ranks, double began_s, double ended_s, int first_step, int steps, const std::string& end) {
  return R"({"start":0,"ranks":)" + std::to_string(ranks) + R"(,"began_s":)" + std::to_string(began_s) +
         R"(,"ended_s":)" + std::to_string(ended_s) + R"(,"first_step":)" + std::to_string(first_step) +
         R"(,"steps":)" + std::to_string(steps) + "," + end + "}\n";
}
constexpr const char* kFailed = R"("exit_code":41,"culprit":1,"resized":false)";
constexpr const char* kResized = R"("exit_code":60,"culprit":-1,"resized":true)";
constexpr const char* kDone = R"("exit_code":0,"culprit":-1,"resized":false)";

TEST(Starts, LostStepsAndEffectiveProgress) {
  const auto teams =
      starts(start_line(3, 1e9, 1e9 + 10, 0, 50, kFailed) + start_line(3, 1e9 + 11, 1e9 + 15, 48, 20, kResized) +
             start_line(2, 1e9 + 16, 1e9 + 40, 68, 32, kDone));
  ASSERT_EQ(teams.size(), 3U);
  EXPECT_EQ(teams[0].lost, 2);
  EXPECT_EQ(teams[1].lost, 0);
  EXPECT_EQ(teams[2].lost, 0);
  EXPECT_EQ(how_it_ended(teams[0]), "rank 1 failed (41)");
  EXPECT_EQ(how_it_ended(teams[1]), "left for another number of ranks");
  EXPECT_EQ(how_it_ended(teams[2]), "done");
  const EffectiveProgress progress = effective_progress(teams);
  EXPECT_EQ(progress.made, 102);
  EXPECT_EQ(progress.kept, 100);
  RunData run = read(run_line(0, 3));
  run.teams = teams;
  const std::string page = draw_page({.name = "run", .folder = "run", .run = run, .traces = {}, .files = {}});
  for (const char* text : {"3 starts, 1 failure, 1 change", "100 of 102 steps made were kept, 98 %", "Steps kept",
                           "start 1, 3 ranks: 50 steps from 0 in 10 s; rank 1 failed (41), 2 steps lost",
                           "seconds since the first start", "steps that were made again"})
    EXPECT_NE(page.find(text), std::string::npos) << text;
  run.teams.resize(1);
  EXPECT_EQ(draw_page({.name = "run", .folder = "run", .run = run, .traces = {}, .files = {}}).find("Starts"),
            std::string::npos)
      << "there is nothing to tell about one";
}

TEST(Starts, LinesMayHoldAnything) {
  const auto teams = starts(
      "{\n[]\n\"text\"\n\n{}\n"
      R"({"ranks":-5,"began_s":1e300,"ended_s":-1,"first_step":1e30,"steps":"x","culprit":null})"
      "\n",
      3);
  ASSERT_EQ(teams.size(), 2U);
  EXPECT_EQ(teams[1].ranks, 1);
  EXPECT_GE(teams[1].ended_s, teams[1].began_s);
  EXPECT_EQ(teams[1].steps, 0);
  EXPECT_FALSE(draw_starts(teams, 300, "narrow").empty());
  EXPECT_FALSE(draw_starts({}, 300, "narrow").empty());
  std::string many;
  for (size_t i = 0; i < kMostTeams + 5; ++i) many += start_line(2, 1e9, 1e9 + 1, 0, static_cast<int>(i), kFailed);
  const auto bounded = starts(many, 5);
  EXPECT_EQ(bounded.size(), kMostTeams);
  EXPECT_EQ(bounded.back().steps, static_cast<int64_t>(kMostTeams) + 4) << "the last one tells how far it came";
}

TEST(Curve, SmoothingKeepsAStraightLineAndItsEnds) {
  std::vector<Curve::Point> line;
  for (int i = 0; i < 50; ++i) line.push_back({.x = 1.0 * i, .mean = 3.0 * i, .count = 1});
  for (const Curve::Point& point : smoothed(line, 9)) EXPECT_NEAR(point.mean, 3 * point.x, 1e-9);
}

TEST(Axis, TicksAreRoundAndWithin) {
  for (double low : {-3.7, 0.0, 1e-9, 0.123, 7.0, 1e6}) {
    for (double width : {1e-9, 0.013, 0.9, 17.0, 1e5}) {
      const auto found = ticks(low, low + width, 5);
      ASSERT_GE(found.size(), 2u) << low << " " << width;
      ASSERT_LE(found.size(), 8u);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_GE(found[i].value, low - width * 1e-6);
        EXPECT_LE(found[i].value, low + width * (1 + 1e-6));
      }
    }
  }
  EXPECT_EQ(ticks(0, 1, 4, false, true).back().label, "100 %");
  EXPECT_EQ(ticks(0, 1872, 5, true)[1].label, "500");
  EXPECT_EQ(ticks(0, 2, 5, true).size(), 3u);
  EXPECT_EQ(logarithmic_ticks(0.1, 2.5).front().label, "0.1");
}

TEST(Text, IsEscaped) {
  EXPECT_EQ(html("<a href=\"x\" id='y'>&</a>"), "&lt;a href=&quot;x&quot; id=&#39;y&#39;&gt;&amp;&lt;/a&gt;");
  EXPECT_EQ(html("\xff\x01"), "\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(url_path("a b/\"<\xc3\xbc>:?#.json"), "a%20b/%22%3C%C3%BC%3E%3A%3F%23.json");
}

TEST(Text, NumbersAreShort) {
  EXPECT_EQ(short_number(0.18664), "0.1866");
  EXPECT_EQ(short_number(91.81), "91.81");
  EXPECT_EQ(short_number(1234.5), "1,234");
  EXPECT_EQ(short_number(8.69e-8), "8.69e-08");
  EXPECT_EQ(short_number(0.5), "0.5");
  EXPECT_EQ(short_number(-0.25), "-0.25");
  EXPECT_EQ(byte_size(828'416), "809 KiB");
  EXPECT_EQ(byte_size(12), "12 B");
  EXPECT_EQ(time_taken(200), "3 min 20 s");
  EXPECT_EQ(utc_time(1'795'246'647), "2026-11-21 07:37:27 UTC");
  EXPECT_EQ(counted(1, "step"), "1 step");
}

TEST(ReadMetrics, ARunThatGoesOnTakesBackWhatCameAfterItsCheckpoint) {
  const RunData run = read(run_line(0) + scalar(1, "loss", "1") + scalar(2, "loss", "2") + scalar(3, "loss", "3") +
                           run_line(2) + scalar(3, "loss", "30") + scalar(4, "loss", "40"));
  std::vector<double> values;
  for (const Curve::Point& point : run.scalars.at("loss").points()) values.push_back(point.mean);
  EXPECT_EQ(values, (std::vector<double>{1, 2, 30, 40}));
  EXPECT_EQ(run.starts, 2);
}

TEST(ReadMetrics, ARunFromTheBeginningTakesTheOldOnesPlace) {
  const RunData run = read(run_line(0) + scalar(1, "loss", "1") + scalar(5, "old", "1") +
                           R"({"type":"steps","step":5,"steps":5,"samples":50,"seconds":1})"
                           "\n" +
                           run_line(0) + scalar(1, "loss", "7"));
  EXPECT_EQ(run.scalars.size(), 1u);
  EXPECT_EQ(run.scalars.at("loss").points().front().mean, 7);
  EXPECT_EQ(run.ranks[0].samples, 0);
  EXPECT_EQ(run.starts, 1);
}

TEST(ReadRun, RanksOfAnEarlierStartWithMoreAreLeftOut) {
  const TemporaryFolder folder;
  const std::string steps = R"({"type":"steps","step":5,"steps":5,"samples":50,"seconds":1})"
                            "\n";
  for (int rank = 0; rank < 3; ++rank)
    std::ofstream(folder.path() / ("metrics_rank" + std::to_string(rank) + ".jsonl"))
        << run_line(0, 3) << steps << (rank < 2 ? run_line(0, 2) + steps : "");
  const RunData run = read_run(folder.path());
  EXPECT_EQ(run.ranks.size(), 2u);
  EXPECT_EQ(mean_throughput(run), 100) << "samples a second of two ranks";
  ASSERT_EQ(run.notes.size(), 1u);
  EXPECT_NE(run.notes[0].find("earlier start"), std::string::npos);
}

TEST(ReadMetrics, WhatIsNoNumberIsCounted) {
  const RunData run = read(run_line(0) + scalar(1, "loss", "1") + scalar(2, "loss", "\"NaN\"") +
                           scalar(3, "loss", "\"-Infinity\"") + scalar(4, "loss", "null"));
  EXPECT_EQ(run.scalars.at("loss").not_finite(), 2);
  EXPECT_EQ(run.scalars.at("loss").first_not_finite(), 2);
}

TEST(Page, AnyRangeOfNumbersIsDrawn) {
  for (const std::string value : {"1e308", "-1e308", "5e-324", "1e149", "0", "-1e-300"}) {
    for (const std::string other : {"1e308", "5e-324", "1", "-1e149", "1e-5"}) {
      PageContent content;
      content.run = read(run_line(0) + scalar(1, "loss", value) + scalar(2, "loss", other) + scalar(3, "loss", value));
      const std::string page = draw_page(content);
      EXPECT_EQ(page.find(">nan"), std::string::npos) << value << " " << other;
      EXPECT_EQ(page.find(">-nan"), std::string::npos) << value << " " << other;
      EXPECT_LT(page.size(), 100'000u);
    }
  }
}

TEST(ReadMetrics, StrangeLinesAreCountedAndLeftOut) {
  const std::string strange[] = {"{", "[]", "1", "{\"type\":1}", "{\"type\":\"?\"}", "\xff", std::string(5 << 20, '[')};
  std::string lines = run_line(0);
  for (const std::string& line : strange) lines += line + "\n";
  lines += scalar(1, "loss", "1") +
           R"({"type":"reductions","buckets":[1,{"bytes":"x"}],"wait_ms_by_rank":{}})"
           "\n" +
           R"({"type":"run","world_size":-5,"command":"no list","versions":[1]})"
           "\n" +
           R"({"type":"scalar","step":1)";
  const RunData run = read(lines);
  EXPECT_EQ(run.ranks[0].unreadable_lines, 8);
}

TEST(ReadMetrics, ThroughputIsThatOfAllRanks) {
  RunData run;
  for (int rank = 0; rank < 2; ++rank) {
    std::istringstream in(run_line(0) + R"({"type":"steps","step":10,"steps":10,"samples":)" +
                          std::to_string(100 * (rank + 1)) +
                          R"(,"seconds":2,"communication_s":0.5})"
                          "\n");
    read_metrics(in, rank, run);
  }
  EXPECT_DOUBLE_EQ(mean_throughput(run), 150);
  EXPECT_DOUBLE_EQ(throughput(run).points().front().mean, 150);
  EXPECT_DOUBLE_EQ(mean_communication_share(run), 0.25);
}

TEST(ScalarCharts, PutTrainAndValidTogether) {
  const RunData run = read(run_line(0) + scalar(1, "valid/accuracy", "0.5") + scalar(1, "valid/loss", "1") +
                           scalar(1, "train/loss", "2") + scalar(1, "lr", "0.1") + scalar(1, "loss/test", "3") +
                           scalar(1, "grad/norm", "4"));
  const auto charts = scalar_charts(run);
  std::vector<std::string> titles;
  for (const ScalarChart& chart : charts) titles.push_back(chart.chart.title);
  EXPECT_EQ(titles, (std::vector<std::string>{"Loss", "Accuracy", "Grad / norm", "Lr"}));
  std::vector<std::string> lines;
  for (const ChartLine& line : charts[0].chart.lines) lines.push_back(line.name);
  EXPECT_EQ(lines, (std::vector<std::string>{"train", "valid", "test"}));
  EXPECT_TRUE(charts[1].chart.share);
}

TEST(Trace, OneThatWasCutOffIsReadToItsLastWholeEvent) {
  const std::string event = R"({"name":"backward","ph":"X","ts":10,"dur":5,"args":{"reduction":"3"}})";
  for (const std::string end : {"\n]\n", ",\n{\"name\":\"wa", ",\n"}) {
    std::istringstream in("[\n{\"name\":\"process_name\"},\n" + event + ",\n" + event + end);
    const TraceOfRank trace = read_trace(in);
    ASSERT_TRUE(trace.contains(3)) << end;
    EXPECT_EQ(trace.at(3)[0].end_us, 15);
  }
  std::istringstream none("no trace");
  EXPECT_THROW(read_trace(none), Error);
}

TEST(Trace, TheStepOfMiddleLengthOnAllRanksIsDrawn) {
  std::map<int, TraceOfRank> traces;
  for (int rank = 0; rank < 2; ++rank)
    for (const int reduction : {1, 2, 3, 4 + rank})
      traces[rank][reduction] = {{"backward", 100.0 * reduction, 100.0 * reduction + 10 * ((reduction * 2) % 5)}};
  const auto step = usual_step(traces);  // 20, 40, 10 us
  ASSERT_TRUE(step);
  EXPECT_EQ(step->reduction, 1);
  EXPECT_EQ(step->ranks.size(), 2u);
  EXPECT_FALSE(usual_step({}));
}

TEST(Events, OfAnyWriterAreReadWhereThereIsNoLog) {
  std::string file;
  append_record(file, summary_event({.step = 1, .wall_s = 1}, "loss", 0.5f));
  append_record(file, summary_event({.step = 2, .wall_s = 1}, "loss", 0.25f));
  append_record(file, session_start_event({.step = 2, .wall_s = 1}));
  append_record(file, summary_event({.step = 2, .wall_s = 1}, "loss", 0.125f));
  RunData run;
  std::istringstream in(file + "cut");
  read_events(in, "name", run);
  ASSERT_EQ(run.scalars.at("loss").points().size(), 2u);
  EXPECT_EQ(run.scalars.at("loss").points()[1].mean, 0.125);
  EXPECT_EQ(run.notes.size(), 1u);
}

/// The titles of the page's cards.
std::vector<std::string> cards(const std::string& page) {
  std::vector<std::string> titles;
  for (size_t at = 0; (at = page.find("<h2>", at)) != std::string::npos;) {
    at += 4;
    titles.push_back(page.substr(at, page.find('<', at) - at));
  }
  return titles;
}

TEST(Page, SaysWhatIsMissing) {
  PageContent content;
  content.name = "<name>";
  content.run = read(run_line(0));
  const std::string page = draw_page(content);
  for (const char* part :
       {"Not recorded: loss (log.step(samples, {{&quot;train/loss&quot;, loss}})); accuracy (log.scalar(",
        "; throughput (log.step(samples)); communication, late ranks, buckets, one step, rank by rank "
        "(log.watch(model)).</p>",
        "&lt;name&gt;", "still running, or cut off"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  EXPECT_EQ(cards(page), (std::vector<std::string>{"System", "Files"})) << "no card is empty";
  EXPECT_EQ(page.find("<polyline class"), std::string::npos);
  EXPECT_EQ(page.find("<name>"), std::string::npos);
  content.run = read(run_line(0, 1));
  EXPECT_EQ(draw_page(content).find("late ranks"), std::string::npos) << "a single rank has nobody to wait for";
}

// What the collectives for C count: no model, no buckets.
TEST(Page, DrawsCommunicationThatNoModelCounted) {
  const std::string steps = R"({"type":"steps","step":1,"steps":1,"samples":8,"seconds":2,"communication_s":0.5})"
                            "\n"
                            R"({"type":"steps","step":2,"steps":1,"samples":8,"seconds":2,"communication_s":0.5})"
                            "\n";
  const PageContent content{
      .name = "run", .folder = "run", .run = read(run_line(0) + scalar(1, "train/loss", "1") + steps)};
  const std::string page = draw_page(content);
  EXPECT_EQ(cards(page), (std::vector<std::string>{"Loss", "Throughput", "Communication", "System", "Files"}));
  EXPECT_NE(page.find("Share of a step in which a rank waits for the others."), std::string::npos);
  EXPECT_EQ(page.find("is hidden behind backward"), std::string::npos) << "nobody measured that";
  EXPECT_NE(page.find("25 %"), std::string::npos);
  const PageContent without{
      .name = "run", .folder = "run", .run = read(run_line(0) + R"({"type":"steps","steps":1,"seconds":2})")};
  EXPECT_EQ(draw_page(without).find("<h2>Communication"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
