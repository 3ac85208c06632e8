#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace lockstep {

/// An array of bytes from a file in the IDX format, which MNIST and its relatives use.
struct IdxFile {
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;  ///< as many as the product of `shape`; the last dimension varies fastest
};

/// Reads `path`, through zlib if its name ends in `.gz`. In `shape`, 0 stands for any size.
///
/// The format: two zero bytes, the type (8: unsigned bytes, the only one read here), the number of dimensions; each
/// dimension as 4 bytes, highest first; the elements. A gzip file must hold one stream and nothing else.
///
/// Throws Error naming the file, with expected and found values, unless file and header agree to the byte. Allocates
/// nothing for the elements before the header has been checked against `shape` and against the most that a file of this
/// size can hold.
IdxFile read_idx(const std::filesystem::path& path, const std::vector<int64_t>& shape);

/// `folder`/`name`, or else `folder`/`name`.gz. Throws Error if neither exists, or if there is no such folder; the text
/// then ends with `remedy`.
std::filesystem::path find_idx(const std::filesystem::path& folder, const std::string& name, const std::string& remedy);

}  // namespace lockstep
