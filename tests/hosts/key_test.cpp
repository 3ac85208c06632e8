#include "hosts/key.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "base/file_descriptor.h"
#include "launch/launch_error.h"
#include "support/temporary_folder.h"

namespace lockstep::hosts {
namespace {

std::string refusal(const std::string& path) {
  try {
    Key::from_file(path);
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code, kExitRefusedPeer);
    return error.what();
  }
  return "";
}

TEST(Key, IsFreshAndComesBackFromItsText) {
  const Key one = Key::generate(), other = Key::generate();
  EXPECT_NE(one.text(), other.text());
  EXPECT_EQ(one.text().size(), 64u);
  EXPECT_EQ(Key::parse(" " + one.text() + "\n", "a test").text(), one.text());
  EXPECT_THROW(Key::parse(one.text().substr(1), "a test"), LaunchError);
  EXPECT_THROW(Key::parse(one.text().substr(1) + "g", "a test"), LaunchError);
}

TEST(Key, AFileThatOthersMayReadIsRefused) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "key";
  EXPECT_NE(refusal(path).find("cannot be read"), std::string::npos);
  std::ofstream(path) << Key::generate().text() << "\n";
  for (const mode_t mode : {0640, 0604, 0620}) {
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    EXPECT_NE(refusal(path).find("other users can read or write"), std::string::npos) << mode;
  }
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(refusal(path), "");
  std::ofstream(path) << "secret\n";
  EXPECT_NE(refusal(path).find("does not hold a key of 64 hexadecimal digits"), std::string::npos);
  EXPECT_NE(refusal(folder.path()).find("is not a file"), std::string::npos);
}

TEST(Key, ComesThroughAPipe) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const FileDescriptor read_end(ends[0]);
  FileDescriptor write_end(ends[1]);
  const Key key = Key::generate();
  const std::string line = key.text() + "\n";
  ASSERT_EQ(::write(ends[1], line.data(), line.size()), static_cast<ssize_t>(line.size()));
  EXPECT_EQ(Key::from_descriptor(ends[0]).text(), key.text());
  write_end.reset();
  EXPECT_THROW(Key::from_descriptor(ends[0]), LaunchError) << "nothing more comes";
}

}  // namespace
}  // namespace lockstep::hosts
