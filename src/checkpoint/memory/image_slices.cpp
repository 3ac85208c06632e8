#include "checkpoint/memory/image_slices.h"

#include <algorithm>
#include <sstream>

#include "base/error.h"

namespace lockstep {
namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kMostBytes = uint64_t{1} << 46;
constexpr uint64_t kMostSlices = 4096;

}  // namespace

uint64_t bytes_in(const std::vector<ByteRange>& ranges) {
  uint64_t sum = 0;
  for (const ByteRange& range : ranges) sum += range.bytes();
  return sum;
}

std::vector<ByteRange> share_of(const std::vector<ByteRange>& ranges, int index, int count) {
  const uint64_t all = bytes_in(ranges);
  const auto bound = [&](int of) {
    return of == count ? all : all * static_cast<uint64_t>(of) / static_cast<uint64_t>(count) / kLine * kLine;
  };
  const uint64_t begin = bound(index), end = bound(index + 1);
  std::vector<ByteRange> share;
  uint64_t before = 0;  // bytes of the ranges passed over
  for (const ByteRange& range : ranges) {
    const uint64_t from = std::max(begin, before), to = std::min(end, before + range.bytes());
    if (from < to) share.push_back({range.begin + (from - before), range.begin + (to - before)});
    before += range.bytes();
  }
  return share;
}

const ImageSlices::Storage* ImageSlices::storage_at(uint64_t begin) const {
  for (const Storage& storage : storages_)
    if (storage.begin == begin) return &storage;
  return nullptr;
}

std::vector<ByteRange> ImageSlices::plain(uint64_t image_bytes) const {
  std::vector<ByteRange> plain;
  uint64_t at = 0;
  for (const Storage& storage : storages_) {
    if (at < storage.begin) plain.push_back({at, storage.begin});
    at = storage.end();
  }
  if (at < image_bytes) plain.push_back({at, image_bytes});
  return plain;
}

std::vector<ByteRange> ImageSlices::of_rank(int rank) const {
  std::vector<ByteRange> slices;
  for (const Storage& storage : storages_)
    for (size_t i = 0; i < storage.holders.size(); ++i)
      if (storage.holders[i] == rank && storage.slice_bytes > 0) slices.push_back(storage.slice(i));
  return slices;
}

uint64_t ImageSlices::bytes_of_rank(int rank) const { return bytes_in(of_rank(rank)); }

bool ImageSlices::is_divided_like(const ImageSlices& other) const {
  return std::equal(
      storages_.begin(), storages_.end(), other.storages_.begin(), other.storages_.end(),
      [](const Storage& a, const Storage& b) { return a.slice_bytes == b.slice_bytes && a.holders == b.holders; });
}

std::string ImageSlices::encode() const {
  std::string text;
  for (const Storage& storage : storages_) {
    text += std::to_string(storage.begin) + ' ' + std::to_string(storage.slice_bytes) + ' ' +
            std::to_string(storage.holders.size());
    for (const int rank : storage.holders) text += ' ' + std::to_string(rank);
    text += '\n';
  }
  return text;
}

ImageSlices ImageSlices::decode(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::vector<Storage> storages;
  uint64_t begin = 0, bytes = 0, count = 0, end = 0;
  while (stream >> begin) {
    stream >> bytes >> count;
    if (!stream || begin < end || begin > kMostBytes || count > kMostSlices || bytes > kMostBytes / (count + 1)) break;
    Storage storage{.begin = begin, .slice_bytes = bytes, .holders = std::vector<int>(count)};
    for (int& rank : storage.holders) stream >> rank;
    if (!stream) break;
    end = storage.end();
    storages.push_back(std::move(storage));
  }
  if (!stream.eof()) throw Error("the description of the slices of a checkpoint in memory is invalid");
  return ImageSlices(std::move(storages));
}

}  // namespace lockstep
