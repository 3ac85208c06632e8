#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Bytes [begin, end) of an image.
struct ByteRange {
  uint64_t begin = 0, end = 0;
  uint64_t bytes() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};

/// The part of a list of ranges that falls to one of `count` readers or writers, if each gets about as many bytes.
std::vector<ByteRange> share_of(const std::vector<ByteRange>& ranges, int index, int count);

/// Where the storages that lie in slices on the ranks are in a common image (memory_slots.h). All other bytes of the
/// image are plain.
class ImageSlices {
 public:
  struct Storage {
    uint64_t begin = 0;        ///< in the image
    uint64_t slice_bytes = 0;  ///< of each slice; they follow each other
    std::vector<int> holders;  ///< by slice: its rank
    bool operator==(const Storage&) const = default;

    uint64_t end() const { return begin + slice_bytes * holders.size(); }
    ByteRange slice(size_t number) const { return {begin + slice_bytes * number, begin + slice_bytes * (number + 1)}; }
  };

  ImageSlices() = default;
  /// `storages`: in the order of the image.
  explicit ImageSlices(std::vector<Storage> storages) : storages_(std::move(storages)) {}

  bool empty() const { return storages_.empty(); }
  const std::vector<Storage>& storages() const { return storages_; }
  /// Null if no such storage begins there.
  const Storage* storage_at(uint64_t begin) const;

  /// The ranges outside slices in an image of this many bytes.
  std::vector<ByteRange> plain(uint64_t image_bytes) const;
  /// The slices of a rank.
  std::vector<ByteRange> of_rank(int rank) const;
  uint64_t bytes_of_rank(int rank) const;

  /// The divisions without the places: equal for images whose places alone have moved.
  bool is_divided_like(const ImageSlices& other) const;

  std::string encode() const;
  /// Throws Error for a text that encode() does not produce.
  static ImageSlices decode(std::string_view text);

 private:
  std::vector<Storage> storages_;
};

/// The sum.
uint64_t bytes_in(const std::vector<ByteRange>& ranges);

}  // namespace lockstep
