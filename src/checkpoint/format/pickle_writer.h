#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace lockstep {

/// The description of a tensor in a .pt file.
struct TensorRecord {
  const Dtype* dtype;
  std::string storage;  ///< key
  uint64_t storage_bytes;
  int64_t offset;  ///< in elements
  std::vector<int64_t> sizes, strides;
  bool requires_grad = false;
};

/// Writes the pickle that torch.save would (protocol 2): values in order, with containers between begin and end.
class PickleWriter {
 public:
  PickleWriter() : text_("\x80\x02") {}

  void none() { text_ += 'N'; }
  void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value);
  void real(double value);
  void text(std::string_view value);
  void tensor(const TensorRecord& tensor);

  void begin_list() { text_ += "]("; }
  void end_list() { text_ += 'e'; }
  void begin_tuple() { text_ += '('; }
  void end_tuple() { text_ += 't'; }
  void begin_dict() { text_ += "}("; }
  /// In between: key, value, key, value ...
  void end_dict() { text_ += 'u'; }

  /// The pickle of the single value written.
  std::string finish() { return std::move(text_) + '.'; }

 private:
  void global(std::string_view module, std::string_view name);
  /// Stores the output since `start` under this key, so that later uses can refer to it.
  bool recall(std::string_view kind, std::string_view name);
  void remember(std::string_view kind, std::string_view name);
  void integers(const std::vector<int64_t>& values);

  std::string text_;
  std::vector<std::pair<std::string, std::string>> memory_;  ///< by place; a pickle has about ten
};

}  // namespace lockstep
