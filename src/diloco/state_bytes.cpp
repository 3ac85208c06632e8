#include "diloco/state_bytes.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <lockstep/error.h>

#include "checkpoint/scalar_type.h"

// The encoding, of little-endian numbers of 8 bytes: kStateMagic, the count of tensors, and for each tensor its name
// and the name of its dtype, each after its length, the number of its dimensions, its sizes, and its elements.

namespace lockstep::diloco {
namespace {

constexpr std::string_view kStateMagic = "LSD1";
constexpr uint64_t kMostDimensions = 16;

void put_word(std::string& to, uint64_t word) { to.append(reinterpret_cast<const char*>(&word), sizeof word); }

void put_text(std::string& to, std::string_view text) {
  put_word(to, text.size());
  to += text;
}

class StateBytesReader {
 public:
  explicit StateBytesReader(std::string_view rest) : rest_(rest) {}

  std::string_view take(uint64_t bytes) {
    if (bytes > rest_.size()) refuse("they end too early");
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  uint64_t word() {
    uint64_t word = 0;
    std::memcpy(&word, take(sizeof word).data(), sizeof word);
    return word;
  }
  std::string text() { return std::string(take(word())); }
  at::Tensor tensor();
  bool is_at_end() const { return rest_.empty(); }
  [[noreturn]] static void refuse(const std::string& why) {
    throw Error("DiLoCo: another machine has sent bytes that are no outer state: " + why +
                "; give all machines the same Lockstep");
  }

 private:
  std::string_view rest_;
};

at::Tensor StateBytesReader::tensor() {
  const Dtype* const dtype = dtype_of_name(text());
  if (dtype == nullptr) refuse("a dtype is unknown");
  const uint64_t dimensions = word();
  if (dimensions > kMostDimensions) refuse("a tensor has " + std::to_string(dimensions) + " dimensions");
  std::vector<int64_t> sizes;
  uint64_t bytes = dtype->bytes;
  for (uint64_t i = 0; i < dimensions; ++i) {
    const uint64_t size = word();
    if (size > rest_.size() || __builtin_mul_overflow(bytes, size, &bytes)) refuse("a tensor is larger than they are");
    sizes.push_back(static_cast<int64_t>(size));
  }
  const std::string_view elements = take(bytes);
  const bool is_truth = dtype == dtype_of(at::kBool);
  if (is_truth && std::any_of(elements.begin(), elements.end(), [](char one) { return one != 0 && one != 1; }))
    refuse("a truth value is neither 0 nor 1");
  at::Tensor tensor = at::empty(sizes, scalar_type_of(*dtype));
  if (!elements.empty()) std::memcpy(tensor.mutable_data_ptr(), elements.data(), elements.size());
  return tensor;
}

}  // namespace

std::string bytes_of_state(const StateDict& state) {
  std::string bytes(kStateMagic);
  put_word(bytes, state.size());
  for (const auto& item : state) {
    const at::Tensor& given = item.value();
    TORCH_CHECK(given.defined() && given.is_cpu() && given.layout() == at::kStrided && dtype_of(given.scalar_type()),
                "DiLoCo: `", item.key(), "` of the outer state is no plain tensor on the CPU, so it cannot be sent");
    const at::Tensor tensor = given.detach().contiguous().resolve_conj().resolve_neg();
    put_text(bytes, item.key());
    put_text(bytes, dtype_of(tensor.scalar_type())->name);
    put_word(bytes, static_cast<uint64_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) put_word(bytes, static_cast<uint64_t>(size));
    bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bytes;
}

StateDict state_of_bytes(std::string_view bytes) {
  StateBytesReader reader(bytes);
  if (bytes.size() < kStateMagic.size() || reader.take(kStateMagic.size()) != kStateMagic)
    StateBytesReader::refuse("they begin with something else");
  StateDict state;
  for (uint64_t count = reader.word(); count > 0; --count) {
    const std::string name = reader.text();
    if (state.contains(name)) StateBytesReader::refuse("a name is there twice");
    state.insert(name, reader.tensor());
  }
  if (!reader.is_at_end()) StateBytesReader::refuse("they go on after its end");
  return state;
}

}  // namespace lockstep::diloco
