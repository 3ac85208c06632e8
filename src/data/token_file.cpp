#include <lockstep/token_file.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "data/token_map.h"

namespace lockstep::datasets {
namespace {

int64_t bytes_of(TokenType type) { return type == TokenType::kByte ? 1 : type == TokenType::kUInt16 ? 2 : 4; }

void check(const TokenFileOptions& options) {
  constexpr int64_t kLongest = int64_t{1} << 40;
  TORCH_CHECK(options.block_length >= 1 && options.stride >= 0 && options.block_length <= kLongest &&
                  options.stride <= kLongest,
              "TokenFile: block_length is ", options.block_length, " and stride ", options.stride,
              "; expected a block_length of at least 1 and a stride of at least 0");
  TORCH_CHECK(options.from >= 0 && options.from <= options.to && options.to <= 1, "TokenFile: the part is ",
              options.from, " to ", options.to, "; expected 0 <= from <= to <= 1");
}

}  // namespace

TokenFile::TokenFile(const std::filesystem::path& path, TokenFileOptions options) : options_(options) {
  check(options);
  if (options.stride == 0) options_.stride = options.block_length;
  map_ = std::make_shared<const TokenMap>(path, bytes_of(options.type));
  const auto place = [&](double share) { return static_cast<int64_t>(share * static_cast<double>(map_->size())); };
  first_ = place(options.from);
  tokens_ = std::min(place(options.to), map_->size()) - first_;
  const int64_t last = tokens_ - options.block_length - 1;  // the latest beginning of a sample
  if (last < 0)
    throw RefusedInput(path.string() + ": expected at least " + std::to_string(options.block_length + 1) +
                       " tokens in the part from " + std::to_string(options.from) + " to " +
                       std::to_string(options.to) + ", for one block and the token that follows it, found " +
                       std::to_string(tokens_) + "; use a shorter block_length or a larger part");
  size_ = last / options_.stride + 1;
}

int64_t TokenFile::unused_tokens() const { return tokens_ - ((size_ - 1) * options_.stride + options_.block_length); }

Batch TokenFile::get(at::ArrayRef<int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  const int64_t length = options_.block_length;
  Batch batch{.data = at::empty({count, length}, at::kLong), .target = at::empty({count, length}, at::kLong)};
  int64_t* data = batch.data.mutable_data_ptr<int64_t>();
  int64_t* target = batch.target.mutable_data_ptr<int64_t>();
  map_->check_length();
  for (int64_t i = 0; i < count; ++i, data += length, target += length) {
    TORCH_CHECK_INDEX(indices[i] >= 0 && indices[i] < size_, "sample ", indices[i], " of a dataset of ", size_);
    const int64_t first = first_ + indices[i] * options_.stride;
    map_->read(first, length, data);
    std::copy_n(data + 1, length - 1, target);
    map_->read(first + length, 1, target + length - 1);
    if (options_.vocabulary <= 0) continue;
    const auto is_foreign = [&](int64_t token) { return token >= options_.vocabulary; };
    const int64_t at = std::find_if(data, data + length, is_foreign) - data;
    if (at == length && !is_foreign(target[length - 1])) continue;
    throw RefusedInput(map_->path().string() + ": token " +
                       std::to_string(at < length ? data[at] : target[length - 1]) + " at position " +
                       std::to_string(first + at) + ", expected tokens below " + std::to_string(options_.vocabulary) +
                       "; the vocabulary or the token type does not match the file");
  }
  return batch;
}

}  // namespace lockstep::datasets
