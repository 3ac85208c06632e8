#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

/// The images of a folder that has a subfolder for each class.
struct ImageListing {
  struct File {
    std::string path;  ///< below the root
    int64_t target;
  };
  std::vector<std::string> classes;
  std::vector<File> files;
};

/// Lists `root`'s folders and the images in and below them, in torchvision's order. Throws Error naming folder or file,
/// as ImageFolder describes.
ImageListing list_images(const std::filesystem::path& root);

}  // namespace lockstep
