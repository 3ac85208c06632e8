#include "checkpoint/format/pickle_writer.h"

#include <bit>
#include <limits>

namespace lockstep {
namespace {

template <typename T>
void put(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

bool PickleWriter::recall(std::string_view kind, std::string_view name) {
  for (size_t place = 0; place < memory_.size(); ++place) {
    if (memory_[place].second != name || memory_[place].first != kind) continue;
    text_ += 'j';
    put(text_, static_cast<uint32_t>(place));
    return true;
  }
  return false;
}

void PickleWriter::remember(std::string_view kind, std::string_view name) {
  const auto place = static_cast<uint32_t>(memory_.size());
  memory_.emplace_back(kind, name);
  text_ += 'r';
  put(text_, place);
}

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    text_ += 'K';
    put(text_, static_cast<uint8_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    text_ += 'J';
    put(text_, static_cast<int32_t>(value));
  } else {
    text_ += "\x8a\x08";
    put(text_, value);
  }
}

void PickleWriter::real(double value) {
  text_ += 'G';
  put(text_, __builtin_bswap64(std::bit_cast<uint64_t>(value)));
}

void PickleWriter::text(std::string_view value) {
  text_ += 'X';
  put(text_, static_cast<uint32_t>(value.size()));
  text_ += value;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  if (recall(module, name)) return;
  text_ += 'c';
  text_ += module;
  text_ += '\n';
  text_ += name;
  text_ += '\n';
  remember(module, name);
}

void PickleWriter::integers(const std::vector<int64_t>& values) {
  begin_tuple();
  for (int64_t value : values) integer(value);
  end_tuple();
}

void PickleWriter::tensor(const TensorRecord& tensor) {
  const bool typed = tensor.dtype->storage != nullptr;
  global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  text_ += "((";
  for (const char* word : {"storage", "cpu"}) {
    if (std::string_view(word) == "cpu") {  // the type and the key stand between the two
      if (typed)
        global("torch", tensor.dtype->storage);
      else
        global("torch.storage", "UntypedStorage");
      text(tensor.storage);
    }
    if (recall("", word)) continue;
    text(word);
    remember("", word);
  }
  integer(static_cast<int64_t>(tensor.storage_bytes / (typed ? tensor.dtype->bytes : 1)));
  text_ += "tQ";
  integer(tensor.offset);
  integers(tensor.sizes);
  integers(tensor.strides);
  boolean(tensor.requires_grad);
  global("collections", "OrderedDict");  // backward hooks: none
  text_ += ")R";
  if (!typed) global("torch", tensor.dtype->name);
  text_ += "tR";
}

}  // namespace lockstep
