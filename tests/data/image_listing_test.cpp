#include "data/image/image_listing.h"

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "data/idx_writer.h"
#include "data/image/image.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class ImageListing_ : public ::testing::Test {
 protected:
  void add(const std::string& path) const {
    fs::create_directories((folder_.path() / path).parent_path());
    folder_.write(path, "");
  }
  std::string failure() const {
    return failure_of<Error>([&] { list_images(folder_.path()); });
  }
  void expect_parts(std::initializer_list<std::string> parts) const {
    const std::string text = failure();
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
  const TemporaryFolder folder_;
};

TEST_F(ImageListing_, IsInTorchvisionsOrder) {
  // sorted(os.walk(...)) compares whole paths, so "b.c/" comes before "b/": '.' < '/'.
  for (const char* path :
       {"b/z.jpg", "b/a.PNG", "b/notes.txt", "b/sub/1.jpeg", "b/sub.d/2.jpg", "B/x.jpg", "\xc3\xa9/y.png", "readme.md"})
    add(path);
  const ImageListing listing = list_images(folder_.path());
  EXPECT_EQ(listing.classes, (std::vector<std::string>{"B", "b", "\xc3\xa9"}));
  std::vector<std::pair<std::string, int64_t>> found;
  for (const auto& file : listing.files) found.emplace_back(file.path, file.target);
  EXPECT_EQ(found, (std::vector<std::pair<std::string, int64_t>>{{"B/x.jpg", 0},
                                                                 {"b/a.PNG", 1},
                                                                 {"b/z.jpg", 1},
                                                                 {"b/sub/1.jpeg", 1},
                                                                 {"b/sub.d/2.jpg", 1},
                                                                 {"\xc3\xa9/y.png", 2}}));
}

TEST_F(ImageListing_, RefusesWhatWouldBeMissing) {
  expect_parts({folder_.path().string(), "expected a folder for each class, found none"});
  add("cat/1.jpg");
  fs::create_directories(folder_.path() / "dog");
  expect_parts({"dog: expected images of this class"});
  add("dog/2.webp");
  expect_parts({"dog/2.webp: expected a JPEG or PNG image; convert"});
  fs::remove(folder_.path() / "dog/2.webp");
  add("dog/2.png");
  EXPECT_EQ(failure(), "");
  fs::create_directory_symlink("..", folder_.path() / "dog/again");
  expect_parts({"a link probably leads back into a folder above it"});
  EXPECT_NE(failure_of<Error>([&] { list_images(folder_.path() / "none"); }).find("none' does not exist"),
            std::string::npos);
}

TEST(DecodeImage, TellsByTheFirstBytes) {
  const auto failure = [](const std::string& text, int64_t greatest = kGreatestImage) {
    return failure_of<Error>(
        [&] { decode_image("a/b.jpg", reinterpret_cast<const uint8_t*>(text.data()), text.size(), greatest); });
  };
  EXPECT_NE(failure("GIF89a").find("a/b.jpg: is neither JPEG nor PNG"), std::string::npos);
  EXPECT_NE(failure("GIF89a").find("found 47 49 46 38 39 61"), std::string::npos);
  EXPECT_NE(failure("").find("found nothing"), std::string::npos);
  EXPECT_NE(failure("\xff\xd8\xff").find("truncated or corrupt JPEG"), std::string::npos);
  EXPECT_NE(failure("\x89PNG\r\n\x1a\n").find("truncated or corrupt PNG"), std::string::npos);
  EXPECT_NE(failure_of<Error>([] {
              check_image_size("c.png", int64_t{1} << 40, int64_t{1} << 40, kGreatestImage);
            }).find("c.png: an image of 1099511627776 x 1099511627776 pixels"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
