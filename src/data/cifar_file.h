#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

/// The files with images, and their format. A file is a sequence of records: `label_bytes` labels, then 3072 pixels:
/// red, green, blue, each 32 rows of 32.
struct CifarLayout {
  std::string folder;                ///< the archive's folder, "cifar-10-batches-bin"
  std::string archive;               ///< "cifar-10-binary.tar.gz"
  std::vector<std::string> members;  ///< files in `folder`, in the order of the images
  std::vector<int> classes;          ///< of each label
  int64_t greatest_records;          ///< in a file
  std::string remedy;                ///< how to get the files, for errors
};

struct CifarImages {
  std::vector<uint8_t> pixels;  ///< [images, 3, 32, 32]
  std::vector<uint8_t> labels;  ///< [images, label bytes]
};

/// Reads all members from `path`: the archive, or a folder that holds the members, or `layout.folder`, or the archive.
///
/// An archive is read in place: nothing is extracted, names in it are compared but never opened, and unpacking stops
/// after 512 MiB. Throws Error naming the file (and the member of an archive), with expected and found values, for
/// anything that is missing, truncated, corrupt, a link, not whole records, too long, or labelled with an unknown
/// class. Memory for a member is allocated only after its size has been checked.
CifarImages read_cifar(const std::filesystem::path& path, const CifarLayout& layout);

}  // namespace lockstep
