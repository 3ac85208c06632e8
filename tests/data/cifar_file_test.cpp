#include "data/cifar_file.h"

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "data/idx_writer.h"
#include "data/tar_writer.h"

namespace lockstep {
namespace {

constexpr size_t kRecord = 3073;

CifarLayout layout() {
  return {.folder = "images",
          .archive = "images.tar.gz",
          .members = {"one.bin", "two.bin"},
          .classes = {10},
          .greatest_records = 4,
          .remedy = "Get some."};
}

/// `count` records: image i has label (first + i) % 10 and pixels (first + i + place) % 251.
std::string records(size_t count, size_t first = 0) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) {
    bytes += static_cast<char>((first + i) % 10);
    for (size_t place = 0; place < 3072; ++place) bytes += static_cast<char>((first + i + place) % 251);
  }
  return bytes;
}

class CifarFile : public ::testing::Test {
 protected:
  std::string failure(const std::filesystem::path& path) const {
    return failure_of<Error>([&] { read_cifar(path, layout()); });
  }
  std::string failure_of_archive(const std::string& tar) const {
    return failure(folder_.write("images.tar.gz", gzip(tar)));
  }
  static void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
  static void expect_five(const CifarImages& images) {
    ASSERT_EQ(images.pixels.size(), 5U * 3072);
    EXPECT_EQ(images.labels, (std::vector<uint8_t>{0, 1, 2, 7, 8}));
    for (size_t image = 0; image < 5; ++image)
      for (size_t place = 0; place < 3072; ++place)
        ASSERT_EQ(images.pixels[image * 3072 + place], ((image < 3 ? image : image + 4) + place) % 251);
  }
  const std::string good_ = tar_entry("images/", "", '5') + tar_entry("images/readme.html", "hello") +
                            tar_entry("images/two.bin", records(2, 7)) + tar_entry("./images/one.bin", records(3));
  const TemporaryFolder folder_;
};

TEST_F(CifarFile, ReadsFolderAndArchive) {
  const auto archive = folder_.write("images.tar.gz", gzip(good_ + tar_end()));
  expect_five(read_cifar(archive, layout()));
  expect_five(read_cifar(folder_.path(), layout()));
  folder_.write("other.tar.gz", gzip(good_ + tar_end()) + std::string(512, '\0'));
  expect_five(read_cifar(folder_.path() / "other.tar.gz", layout()));
  std::filesystem::create_directory(folder_.path() / "images");
  folder_.write("images/one.bin", records(3));
  folder_.write("images/two.bin", records(2, 7));
  folder_.write("images.tar.gz", "not looked at");
  expect_five(read_cifar(folder_.path(), layout()));
  expect_five(read_cifar(folder_.path() / "images", layout()));
}

TEST_F(CifarFile, SaysWhatIsMissing) {
  expect_parts(failure(folder_.path() / "nowhere"), {"nowhere' does not exist. Get some."});
  expect_parts(failure(folder_.path()), {"contains neither one.bin, nor images, nor images.tar.gz. Get some."});
  folder_.write("one.bin", records(1));
  expect_parts(failure(folder_.path()), {"two.bin", "No such file"});
  expect_parts(failure_of_archive(tar_entry("images/one.bin", records(1))), {"contains no images/two.bin. Get some."});
}

TEST_F(CifarFile, RefusesFilesThatAreNoRecords) {
  folder_.write("two.bin", records(1));
  folder_.write("one.bin", records(2) + "x");
  expect_parts(failure(folder_.path()),
               {"one.bin: expected whole records of 3073 bytes, found 6147 bytes, 1 too many"});
  folder_.write("one.bin", "");
  expect_parts(failure(folder_.path()), {"found 0 bytes"});
  folder_.write("one.bin", records(5));
  expect_parts(failure(folder_.path()), {"expected at most 4 images, found 5"});
  std::string wrong = records(2);
  wrong[kRecord] = 10;
  folder_.write("one.bin", wrong);
  expect_parts(failure(folder_.path()), {"one.bin: label 10 of the image at byte 3073, expected 0 to 9"});
}

TEST_F(CifarFile, NamesInAnArchiveAreNotFollowed) {
  // None of these may be taken for a member, and nothing may be written or read elsewhere.
  folder_.write("secret.bin", records(1));
  std::string tar;
  for (const char* name : {"../images/one.bin", "/images/one.bin", "images/../images/one.bin", "images//one.bin",
                           "images/one.bin/x", "other/one.bin", "one.bin"})
    tar += tar_entry(name, records(1));
  expect_parts(failure_of_archive(tar + tar_end()), {"contains no images/one.bin"});
  for (const char type : {'1', '2', '3', '5', '6'})
    expect_parts(failure_of_archive(tar_entry("images/one.bin", "", type, "../secret.bin") + tar_end()),
                 {"images/one.bin: expected a file, found a link, a folder or a device"});
  expect_parts(failure_of_archive(good_ + tar_entry("images/one.bin", records(1)) + tar_end()),
               {"is in the archive twice"});
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_.path())) ++files;
  EXPECT_EQ(files, 2U);
}

TEST_F(CifarFile, SizesAreCheckedBeforeTheyAreBelieved) {
  expect_parts(failure_of_archive(tar_entry("images/one.bin", records(1), '0', "", size_t{1} << 32)),
               {"images/one.bin", "4294967296 bytes"});
  expect_parts(failure_of_archive(tar_entry("images/one.bin", records(5)) + tar_end()), {"at most 4 images, found 5"});
  expect_parts(failure_of_archive(tar_entry("images/one.bin", records(1), '0', "", 2 * kRecord)),
               {"images.tar.gz: is a corrupt archive after", "Truncated"});
  // An unwanted member of 7 GiB that is not there.
  expect_parts(failure_of_archive(tar_entry("images/other", "x", '0', "", size_t{7} << 30)), {"images.tar.gz: "});
}

TEST_F(CifarFile, ABombIsCutOff) {
  constexpr size_t kMegabyte = 1 << 20, kMegabytes = 520;
  const auto path = folder_.path() / "images.tar.gz";
  gzFile file = gzopen(path.c_str(), "wb1");
  const std::string header = tar_entry("images/other", "", '0', "", kMegabytes * kMegabyte), zeros(kMegabyte, '\0');
  gzwrite(file, header.data(), static_cast<unsigned>(header.size()));
  for (size_t i = 0; i < kMegabytes; ++i) gzwrite(file, zeros.data(), kMegabyte);
  ASSERT_EQ(gzclose(file), Z_OK);
  EXPECT_LT(std::filesystem::file_size(path), 4 * kMegabyte);
  expect_parts(failure(path), {"images.tar.gz: unpacks to more than 536870912 bytes"});
}

TEST_F(CifarFile, EveryTruncationIsNoticed) {
  const std::string whole = gzip(good_ + tar_end());
  for (size_t size = 0; size < whole.size(); size += size < 64 || size + 64 > whole.size() ? 1 : 97) {
    const std::string text = failure(folder_.write("images.tar.gz", whole.substr(0, size)));
    expect_parts(text, {"images.tar.gz"});
  }
}

TEST_F(CifarFile, ChangedBytesAreNoticed) {
  const std::string whole = gzip(good_ + tar_end());
  for (size_t at = 10; at + 8 < whole.size(); at += 13) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    EXPECT_NE(failure(folder_.write("images.tar.gz", changed)), "") << "byte " << at;
  }
  expect_parts(failure(folder_.write("images.tar.gz", "PK\x03\x04 zip")),
               {"is not a gzip file: expected it to start with"});
  expect_parts(failure_of_archive("this is no tar, and long enough to be told from one" + std::string(600, 'x')),
               {"is a corrupt archive"});
}

}  // namespace
}  // namespace lockstep
