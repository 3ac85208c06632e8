#include "observe/growing_file.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <thread>

#include "base/atomic_file.h"
#include "observe/full_disk.h"
#include "support/temporary_folder.h"

namespace lockstep::growing_file_test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong = std::chrono::hours(1);

class GrowingFileTest : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
  const std::string path_ = (folder_.path() / "file").string();
};

TEST_F(GrowingFileTest, AddsToWhatIsThere) {
  for (const char* text : {"one\n", "two\n"}) GrowingFile(path_, "the file", kLong).append(text);
  EXPECT_EQ(read_file(path_), "one\ntwo\n");
}

TEST_F(GrowingFileTest, WritesSeldom) {
  FullDisk disk(1 << 30);
  ScopedFileOperations scoped(disk);
  GrowingFile file(path_, "the file", kLong);
  const std::string record(100, 'x');
  constexpr int kRecords = 10'000;  // 1 MB
  for (int i = 0; i < kRecords; ++i) file.append(record);
  EXPECT_EQ(disk.writes, kRecords * 100 / static_cast<int64_t>(GrowingFile::kMostBytes + 60));
  file.flush();
  EXPECT_EQ(read_file(path_).size(), kRecords * 100u);
}

TEST_F(GrowingFileTest, WritesWhenTheTimeHasCome) {
  GrowingFile file(path_, "the file", milliseconds(30));
  file.append("one\n");
  EXPECT_EQ(read_file(path_), "");
  std::this_thread::sleep_for(milliseconds(50));
  file.append("two\n");
  EXPECT_EQ(read_file(path_), "one\ntwo\n");
}

TEST_F(GrowingFileTest, AFullDiskCostsWholeRecordsAndIsSaidOnce) {
  FullDisk disk(6);
  ScopedFileOperations scoped(disk);
  ::testing::internal::CaptureStderr();
  {
    GrowingFile file(path_, "the file", kLong);
    for (const char* text : {"one\n", "two\n", "three\n"}) {
      file.append(text);
      file.flush();
    }
    EXPECT_EQ(file.lost(), 2);  // 2 of the 4 bytes of "two" fitted, and were taken back
    EXPECT_EQ(read_file(path_), "one\n");
    disk.room = 100;
    file.append("four\n");
  }
  EXPECT_EQ(read_file(path_), "one\nfour\n");
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("the file " + path_ + " cannot be written (No space left on device); training goes on"),
            std::string::npos);
  EXPECT_EQ(said.find("lockstep: "), said.rfind("lockstep: ")) << said;
}

TEST_F(GrowingFileTest, AFileThatFindsNoRoomAtFirstIsMadeLater) {
  FullDisk disk(100);
  disk.refuses_to_open = true;
  ScopedFileOperations scoped(disk);
  ::testing::internal::CaptureStderr();
  GrowingFile file(path_, "the file", kLong);
  file.append("one\n");
  file.flush();
  EXPECT_EQ(file.lost(), 1);
  disk.refuses_to_open = false;
  file.append("two\n");
  file.flush();
  EXPECT_EQ(read_file(path_), "two\n");
  EXPECT_NE(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(GrowingFileTest, AFolderThatIsNotThereIsAnError) {
  EXPECT_THROW(GrowingFile("/nowhere/file", "the file", kLong), Error);
}

}  // namespace
}  // namespace lockstep::growing_file_test
