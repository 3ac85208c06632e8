#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include <lockstep/dataset.h>

namespace lockstep {

class TokenMap;

namespace datasets {

/// How a token lies in the file: an unsigned number, lowest byte first.
enum class TokenType { kByte, kUInt16, kUInt32 };

struct TokenFileOptions {
  /// Tokens of a sample.
  int64_t block_length = 1024;
  /// kByte makes any text file one: its bytes are the tokens, the vocabulary 256.
  TokenType type = TokenType::kUInt16;
  /// Tokens from the beginning of a sample to that of the next. 0: block_length, so that each token is predicted once.
  int64_t stride = 0;
  /// The part of the file, e.g. 0 to 0.9 for training and 0.9 to 1 for validation.
  double from = 0;
  double to = 1;
  /// Above 0: a token that is not below it is an Error when its sample is read.
  int64_t vocabulary = 0;
};

/// Tokens for a language model, one after another in a file and nothing else, as nanoGPT's train.bin. Mapped into
/// memory, so that ranks on a machine share one copy and a file may be larger than memory.
///
/// Sample i is `data`, the block_length tokens from place i * stride on, and `target`, those one place further: both
/// int64 [n, block_length]. Tokens at the end of the part that fill no sample are left out.
class TokenFile : public Dataset {
 public:
  /// Throws Error naming the file, with expected and found and what to do, for one that is missing, is not whole
  /// tokens, or is too short for one sample; c10::Error for options that make no sense.
  explicit TokenFile(const std::filesystem::path& path, TokenFileOptions options = {});

  int64_t size() const override { return size_; }
  /// Throws c10::Error for an index out of range; Error for a token beyond the vocabulary, and where the file has
  /// become shorter since it was opened.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// Tokens in the part.
  int64_t tokens() const { return tokens_; }
  /// Of these, those at the end that are in no sample's data.
  int64_t unused_tokens() const;

 private:
  std::shared_ptr<const TokenMap> map_;
  TokenFileOptions options_;
  int64_t first_ = 0;  // place of the part in the file
  int64_t tokens_ = 0;
  int64_t size_ = 0;
};

}  // namespace datasets
}  // namespace lockstep
