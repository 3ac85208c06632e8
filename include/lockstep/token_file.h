#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include <lockstep/dataset.h>

namespace lockstep {

class TokenMap;

namespace datasets {

/// The format of a token: an unsigned little-endian number.
enum class TokenType { kByte, kUInt16, kUInt32 };

struct TokenFileOptions {
  /// Tokens per sample.
  int64_t block_length = 1024;
  /// kByte reads any text file: its bytes are the tokens, with a vocabulary of 256.
  TokenType type = TokenType::kUInt16;
  /// Tokens from the start of one sample to the start of the next. 0: block_length, so that each token is predicted
  /// once.
  int64_t stride = 0;
  /// The part of the file to use, for example 0 to 0.9 for training and 0.9 to 1 for validation.
  double from = 0;
  double to = 1;
  /// If above 0: reading a sample with a token that is not below this number throws Error.
  int64_t vocabulary = 0;
};

/// Tokens for a language model, from a file of nothing but tokens, like nanoGPT's train.bin. The file is mapped into
/// memory, so that the ranks of a machine share one copy, and may be larger than memory.
///
/// Sample i consists of `data`, the block_length tokens from position i * stride on, and `target`, the tokens one
/// position further, both int64 [n, block_length]. Tokens at the end that do not fill a sample are left out.
class TokenFile : public Dataset {
 public:
  /// Throws Error naming the file, with expected and found values and what to do, if it is missing, does not consist of
  /// whole tokens, or is too short for one sample; c10::Error for invalid options.
  explicit TokenFile(const std::filesystem::path& path, TokenFileOptions options = {});

  int64_t size() const override { return size_; }
  /// Throws c10::Error for an index out of range; Error for a token beyond the vocabulary, or if the file has shrunk
  /// since it was opened.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// Number of tokens in the part.
  int64_t tokens() const { return tokens_; }
  /// The number of tokens at the end that are in no sample's data.
  int64_t unused_tokens() const;

 private:
  std::shared_ptr<const TokenMap> map_;
  TokenFileOptions options_;
  int64_t first_ = 0;  // position of the used part in the file
  int64_t tokens_ = 0;
  int64_t size_ = 0;
};

}  // namespace datasets
}  // namespace lockstep
