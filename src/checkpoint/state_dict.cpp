#include <cstdio>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

/// FNV-1a over 64 bits (Fowler, Noll, Vo), eight bytes at a time where there are eight.
class Hash {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    for (; size >= 8; size -= 8, bytes += 8) {
      uint64_t word;
      __builtin_memcpy(&word, bytes, 8);
      mix(word);
    }
    for (; size > 0; --size) mix(*bytes++);
  }
  void add(const std::string& text) {
    add(text.data(), text.size());
    mix(text.size());
  }
  std::string digits() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value_));
    return text;
  }

 private:
  void mix(uint64_t word) {
    value_ = (value_ ^ word) * 0x100000001b3;
    value_ ^= value_ >> 32;  // lets the high bits of a word reach the low bits of the hash
  }
  uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) state.insert(item.key(), item.value());
  for (const auto& item : module.named_buffers()) state.insert(item.key(), item.value());
  return state;
}

void load_state_dict(torch::nn::Module& module, const StateDict& state) {
  const StateDict own = state_dict(module);
  std::string problems;
  for (const auto& item : own) {
    const at::Tensor* given = state.find(item.key());
    if (given == nullptr) {
      problems += "\n  missing: " + item.key();
    } else if (given->sizes() != item.value().sizes()) {
      problems += "\n  shape of " + item.key() + ": " + shape_of(*given) + " given, " + shape_of(item.value()) +
                  " in the module";
    }
  }
  for (const auto& item : state)
    if (!own.contains(item.key())) problems += "\n  unknown: " + item.key();
  if (!problems.empty()) throw Error("the state does not fit the module:" + problems);
  at::NoGradGuard no_grad;
  for (const auto& item : own) at::Tensor(item.value()).copy_(state[item.key()]);
}

StateDict with_prefix(const std::string& prefix, const StateDict& state) {
  StateDict result;
  for (const auto& item : state) result.insert(prefix + item.key(), item.value());
  return result;
}

StateDict without_prefix(const std::string& prefix, const StateDict& state) {
  StateDict result;
  for (const auto& item : state)
    if (item.key().starts_with(prefix)) result.insert(item.key().substr(prefix.size()), item.value());
  return result;
}

std::string hash(const StateDict& state) {
  Hash hash;
  for (const auto& item : state) {
    const at::Tensor tensor = item.value().detach().to(at::kCPU).contiguous();
    hash.add(item.key());
    hash.add(std::string(c10::toString(tensor.scalar_type())) + shape_of(tensor));
    hash.add(tensor.const_data_ptr(), tensor.nbytes());
  }
  return hash.digits();
}

}  // namespace lockstep
