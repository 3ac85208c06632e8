#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

/// Which files hold images, and what is in them. A file is records one after another: `label_bytes` labels, then 3072
/// pixels: red, green, blue, each 32 rows of 32.
struct CifarLayout {
  std::string folder;                ///< that the archive makes, "cifar-10-batches-bin"
  std::string archive;               ///< "cifar-10-binary.tar.gz"
  std::vector<std::string> members;  ///< files in `folder`, in the order of the images
  std::vector<int> classes;          ///< of each label
  int64_t greatest_records;          ///< in a file
  std::string mend;                  ///< how to get the files, for errors
};

struct CifarImages {
  std::vector<uint8_t> pixels;  ///< [images, 3, 32, 32]
  std::vector<uint8_t> labels;  ///< [images, label bytes]
};

/// Reads all members from `path`: the archive, or a folder that holds the members, or `layout.folder`, or the archive.
///
/// An archive is read where it is: nothing is extracted, names in it are compared and never opened, and unpacking stops
/// after 512 MiB. Throws Error naming the file, and in an archive the member, with expected and found, for what is
/// missing, truncated, corrupt, a link, not whole records, too long, or labelled with no class. Memory is taken for a
/// member once its size has been checked.
CifarImages read_cifar(const std::filesystem::path& path, const CifarLayout& layout);

}  // namespace lockstep
