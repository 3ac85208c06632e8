#include "data/image/image_listing.h"
#include "base/error.h"

#include <algorithm>
#include <array>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kGreatestDepth = 40;  // deeper folders are taken for links into themselves

std::string lower_extension(const fs::path& path) {
  std::string extension = path.extension().string();
  for (char& c : extension)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return extension;
}

bool contains(const auto& list, const std::string& text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

/// Whether the file is an image that can be read here. A format that torchvision reads and we do not is refused,
/// because leaving it out silently would be wrong.
bool is_image(const fs::path& path) {
  static const std::array<std::string, 3> kRead{".jpg", ".jpeg", ".png"};
  static const std::array<std::string, 6> kOther{".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"};
  const std::string extension = lower_extension(path);
  if (contains(kOther, extension))
    throw RefusedInput(path.string() + ": expected a JPEG or PNG image; convert or remove this file");
  return contains(kRead, extension);
}

/// Folders at and below `folder`, as os.walk finds them, following links.
void collect_folders(const fs::path& folder, int depth, std::vector<fs::path>& folders) {
  if (depth > kGreatestDepth)
    throw RefusedInput(folder.string() + ": more than " + std::to_string(kGreatestDepth) +
                       " folders deep; a link probably leads back into a folder above it");
  folders.push_back(folder);
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.is_directory()) collect_folders(entry.path(), depth + 1, folders);
}

void list_class(const fs::path& root, const std::string& name, int64_t target, ImageListing& listing) {
  std::vector<fs::path> folders;
  collect_folders(root / name, 1, folders);
  // Byte order, which in UTF-8 equals Python's order of code points; std::filesystem::path compares component by
  // component.
  const auto by_bytes = [](const fs::path& one, const fs::path& other) { return one.native() < other.native(); };
  std::sort(folders.begin(), folders.end(), by_bytes);
  const size_t before = listing.files.size();
  for (const fs::path& folder : folders) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder))
      if (!entry.is_directory() && is_image(entry.path())) files.push_back(entry.path());
    std::sort(files.begin(), files.end(), by_bytes);
    for (const fs::path& file : files)
      listing.files.push_back({file.native().substr((root / "").native().size()), target});
  }
  if (listing.files.size() == before)
    throw RefusedInput((root / name).string() + ": expected images of this class (.jpg, .jpeg or .png), found none");
}

}  // namespace

ImageListing list_images(const fs::path& root) try {
  std::error_code ignored;
  if (!fs::is_directory(root, ignored))
    throw RefusedInput("data folder '" + root.string() +
                       "' does not exist; give a folder that contains a folder for each class");
  ImageListing listing;
  for (const auto& entry : fs::directory_iterator(root))
    if (entry.is_directory()) listing.classes.push_back(entry.path().filename().string());
  std::sort(listing.classes.begin(), listing.classes.end());
  if (listing.classes.empty()) throw RefusedInput(root.string() + ": expected a folder for each class, found none");
  for (size_t i = 0; i < listing.classes.size(); ++i)
    list_class(root, listing.classes[i], static_cast<int64_t>(i), listing);
  return listing;
} catch (const fs::filesystem_error& error) {
  throw RefusedInput("listing " + root.string() + ": " + error.what());
}

}  // namespace lockstep
