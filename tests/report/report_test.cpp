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

TEST(Page, SaysWhatIsMissing) {
  PageContent content;
  content.name = "<name>";
  content.run = read(run_line(0));
  const std::string page = draw_page(content);
  for (const char* part :
       {"No loss was logged", "No accuracy was logged", "No steps were counted", "No model was watched",
        "Ranks were not compared", "No reduction was traced", "&lt;name&gt;", "still running, or cut off"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  EXPECT_EQ(page.find("<polyline class"), std::string::npos);
  EXPECT_EQ(page.find("<name>"), std::string::npos);
  content.run = read(run_line(0, 1));
  EXPECT_NE(draw_page(content).find("A single rank has nobody to wait for"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
