#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "base/atomic_file.h"
#include "observe/events/crc32c.h"
#include "observe/events/event_file.h"
#include "observe/events/event_reader.h"
#include "observe/events/png.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

// What the real TensorBoard makes of these files is in tests/programs/tensorboard_test.py.

std::string sample_file() {
  const Histogram histogram{.min = 0, .max = 1, .count = 1, .limits = {0, 1}, .counts = {0, 1}};
  std::string file;
  append_record(file, version_event(1.5));
  append_record(file, session_start_event({.step = 3, .wall_s = 2}));
  append_record(file, summary_event({.step = 4, .wall_s = 2.5}, "loss", 0.5f));
  append_record(file, summary_event({.step = 5, .wall_s = 3}, "weights", &histogram));
  append_record(file, summary_event({.step = 6, .wall_s = 3}, "note/text_summary", TextContent{"hello"}));
  append_record(file, summary_event({.step = -7, .wall_s = 3}, "picture", PngImage{1, 1, 1, "png"}));
  return file;
}

std::vector<Event> events_of(const std::string& bytes, std::string& trouble) {
  std::istringstream in(bytes);
  EventReader reader(in);
  std::vector<Event> events;
  while (auto event = reader.next()) events.push_back(std::move(*event));
  trouble = reader.trouble();
  return events;
}

TEST(Crc32c, OfRfc3720) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
}

TEST(EventReader, ReadsWhatWasWritten) {
  std::string trouble;
  const auto events = events_of(sample_file(), trouble);
  EXPECT_EQ(trouble, "");
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(events[0].wall_s, 1.5);
  EXPECT_TRUE(events[1].starts_session);
  EXPECT_EQ(events[1].step, 3);
  EXPECT_EQ(events[2].values[0].tag, "loss");
  EXPECT_EQ(events[2].values[0].kind, SummaryKind::kScalar);
  EXPECT_EQ(events[2].values[0].number, 0.5);
  EXPECT_EQ(events[3].values[0].kind, SummaryKind::kHistogram);
  EXPECT_EQ(events[4].values[0].kind, SummaryKind::kText);
  EXPECT_EQ(events[5].values[0].kind, SummaryKind::kImage);
  EXPECT_EQ(events[5].step, -7);
}

TEST(EventReader, AFileThatWasCutGivesItsWholeRecords) {
  const std::string file = sample_file();
  std::string trouble;
  size_t last = 0;
  for (size_t size = 0; size < file.size(); ++size) {
    const size_t count = events_of(file.substr(0, size), trouble).size();
    EXPECT_GE(count, last);
    EXPECT_LE(count, last + 1);
    EXPECT_TRUE(count == last || trouble.empty()) << size;
    last = count;
  }
  EXPECT_EQ(last, 5u);
  EXPECT_NE(trouble.find("record 6 at byte"), std::string::npos) << trouble;
}

TEST(EventReader, NoChangedBitGoesUnnoticed) {
  const std::string file = sample_file();
  std::string trouble;
  for (size_t bit = 0; bit < file.size() * 8; ++bit) {
    std::string changed = file;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    EXPECT_LT(events_of(changed, trouble).size(), 6u) << bit;
    EXPECT_NE(trouble, "") << bit;
  }
}

TEST(EventReader, TakesNoMemoryForALengthThatLies) {
  std::string record;
  append_record(record, "");
  for (const uint64_t length : {uint64_t{1} << 62, uint64_t{EventReader::kMostRecordBytes}}) {
    std::string lies(reinterpret_cast<const char*>(&length), 8);
    const uint32_t sum = masked_crc32c(lies);
    lies.append(reinterpret_cast<const char*>(&sum), 4);
    std::string trouble;
    EXPECT_EQ(events_of(record + lies + "few bytes", trouble).size(), 1u);
    EXPECT_NE(trouble.find("record 2 at byte 16 "), std::string::npos) << trouble;
  }
}

TEST(EventFile, IsNamedAsTensorBoardExpects) {
  TemporaryFolder folder;
  const std::string below = (folder.path() / "a" / "b").string();
  const EventFile one(below, ".end", std::chrono::seconds(1)), other(below, "", std::chrono::seconds(1));
  EXPECT_NE(one.path(), other.path());
  const std::string name = one.path().substr(below.size() + 1);
  EXPECT_TRUE(name.starts_with("events.out.tfevents.1") || name.starts_with("events.out.tfevents.2")) << name;
  EXPECT_TRUE(name.ends_with(".end")) << name;
  EXPECT_NE(name.find(std::to_string(::getpid()) + "."), std::string::npos) << name;
}

TEST(Histogram, KeepsWhatIsNoNumberOutOfTheSums) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const std::vector<double> values{1, nan, -infinity, infinity, 2};
  const Histogram histogram = make_histogram(values.data(), 5);
  EXPECT_EQ(histogram.count, 4);
  EXPECT_EQ(histogram.sum, 3);
  EXPECT_EQ(histogram.sum_of_squares, 5);
  EXPECT_EQ(histogram.min, 1);
  EXPECT_EQ(histogram.max, 2);
  EXPECT_EQ(histogram.counts.back(), 1);
  EXPECT_EQ(make_histogram(&nan, 1).count, 0);
  EXPECT_EQ(make_histogram(&nan, 1).limits.size(), 1u);
}

TEST(Histogram, EveryValueLiesInItsBucket) {
  for (double value = 1e-14; value < 1e22; value *= 1.013) {
    for (const double one : {value, -value}) {
      const Histogram histogram = make_histogram(&one, 1);
      ASSERT_EQ(histogram.counts.size(), 2u);
      ASSERT_EQ(histogram.counts[1], 1);
      if (value >= 9e19) continue;  // beyond the last limit
      ASSERT_LE(histogram.limits[0], one);
      ASSERT_LT(one, histogram.limits[1]);
    }
  }
}

}  // namespace
}  // namespace lockstep
