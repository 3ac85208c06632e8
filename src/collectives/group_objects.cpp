#include <algorithm>
#include <optional>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/rank_names.h"
#include "base/shared_weights.h"
#include "collectives/called_as.h"
#include "collectives/contains_itself.h"
#include "collectives/group_state.h"
#include "collectives/purpose.h"
#include "collectives/storages.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

// Object collectives send lengths first, then bytes. LibTorch's own pickler pickles the values.
//
// Engines compare kinds and sizes, so the library's functions that gather bytes look alike to them. Where all ranks see
// all lengths, each length therefore has a hash of its rank's OperationLabel above it, and different functions end with
// an error before bytes are taken for another function's.

namespace lockstep {
namespace {

at::Tensor to_tensor(std::string_view bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(tensor.data_ptr<uint8_t>()));
  return tensor;
}

std::string to_string(const at::Tensor& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()), bytes.numel());
}

at::Tensor to_tensor(const std::vector<int64_t>& numbers) { return at::tensor(numbers, at::kLong); }

constexpr const char* kSend = "; send numbers, text, tensors, and lists, tuples and dictionaries of these";

/// The bytes that a rank sends for an object. If it cannot be pickled, these are empty, which is not a valid pickle.
struct Pickled {
  std::string bytes, problem;
};

/// The place of the first undefined tensor in a value, such as `["weights"][2]`; "" if it is the value itself. None if
/// none.
std::optional<std::string> place_of_undefined(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? std::nullopt : std::optional(std::string());
  if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict())
      if (const auto found = place_of_undefined(item.value())) {
        std::ostringstream place;
        place << '[' << item.key() << ']' << *found;
        return place.str();
      }
  } else if (value.isTuple() || value.isList()) {
    const auto elements =
        value.isTuple() ? c10::ArrayRef<c10::IValue>(value.toTupleRef().elements()) : value.toListRef();
    for (size_t i = 0; i < elements.size(); ++i)
      if (const auto found = place_of_undefined(elements[i])) return '[' + std::to_string(i) + ']' + *found;
  }
  return std::nullopt;
}

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) return tensors.push_back(value.toTensor());
  if (value.isGenericDict())
    for (const auto& item : value.toGenericDict()) add_tensors(item.value(), tensors);
  else if (value.isTuple() || value.isList())
    for (const c10::IValue& element :
         value.isTuple() ? c10::ArrayRef<c10::IValue>(value.toTupleRef().elements()) : value.toListRef())
      add_tensors(element, tensors);
}

/// Describes weights among the tensors of a value that several ranks have changed though all share one copy.
std::string trouble_of_weights(const c10::IValue& value) {
  if (all_shared_weights().empty()) return "";
  std::vector<at::Tensor> tensors;
  add_tensors(value, tensors);
  return trouble_of(shared_weights_in(storages_of(tensors)));
}

Pickled pickle(const c10::IValue& object) {
  if (contains_itself(object)) return {"", std::string("an object contains itself, so it cannot be sent") + kSend};
  if (const auto place = place_of_undefined(object)) {
    const std::string what = place->empty() ? "it" : "its element " + *place;
    return {"", "an object cannot be sent: " + what + " is an undefined tensor" + kSend};
  }
  if (const std::string trouble = trouble_of_weights(object); !trouble.empty())
    return {"", "an object cannot be sent: " + trouble};
  try {
    const std::vector<char> bytes = torch::jit::pickle_save(object);
    return {std::string(bytes.begin(), bytes.end()), ""};
  } catch (const c10::Error& error) {
    return {"", std::string("an object cannot be sent: ") + error.what_without_backtrace() + kSend};
  }
}

/// Throws on all ranks if some rank has sent nothing. Every rank calls it, with its own problem.
[[noreturn]] void refuse_together(const Group& group, const char* function, const std::string& problem) {
  const auto problems = group.all_gather_bytes(problem);
  const auto first = std::find_if(problems.begin(), problems.end(), [](const auto& one) { return !one.empty(); });
  throw Error(std::string(function) + ": " + ranks_with(problems, *first) + ": " + *first);
}

c10::IValue unpickle(const std::string& bytes) {
  return torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
}

constexpr int kLengthBits = 40;
constexpr int64_t kLongest = (int64_t{1} << kLengthBits) - 1;

/// 23 bits, stored above a length's.
int64_t hash_of_label() {
  Hash hash;
  hash.add(std::string(OperationLabel::current()));
  return static_cast<int64_t>((hash.value() & 0x7fffff) << kLengthBits);
}

/// Called by every rank if they gather for different functions.
[[noreturn]] void refuse_other_function(const Group& group, const char* operation) {
  const std::string mine(OperationLabel::current());
  const OperationLabel none("");
  const auto purposes = group.all_gather_bytes(mine);
  std::string text = "ranks disagree on what they gather:";
  for (size_t rank = 0; rank < purposes.size(); ++rank)
    if (std::find(purposes.begin(), purposes.begin() + static_cast<std::ptrdiff_t>(rank), purposes[rank]) ==
        purposes.begin() + static_cast<std::ptrdiff_t>(rank))
      text += (rank == 0 ? " " : ", ") + ranks_with(purposes, purposes[rank]) + " called " +
              call_of_purpose(operation + std::string("()"), purposes[rank]);
  text += ". All ranks must call the same operations in the same order." + advice_on(purposes);
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

/// All ranks' lengths, rank by rank.
std::vector<int64_t> all_lengths(const Group& group, std::string_view bytes, const char* operation) {
  const auto length = static_cast<int64_t>(bytes.size());
  TORCH_CHECK(length <= kLongest, operation, ": ", length, " bytes are more than the ", kLongest, " that can be sent");
  const at::Tensor lengths = group.all_gather(to_tensor(std::vector<int64_t>{length | hash_of_label()}));
  const int64_t* data = lengths.const_data_ptr<int64_t>();
  std::vector<int64_t> all(data, data + lengths.numel());
  const int64_t label = all.front() >> kLengthBits;
  if (std::any_of(all.begin(), all.end(), [&](int64_t one) { return one >> kLengthBits != label; }))
    refuse_other_function(group, operation);
  for (int64_t& one : all) one &= kLongest;
  return all;
}

at::Tensor padded(std::string_view bytes, int64_t length) {
  auto tensor = at::zeros({length}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(tensor.data_ptr<uint8_t>()));
  return tensor;
}

std::vector<std::string> cut(const at::Tensor& rows, const std::vector<int64_t>& lengths) {
  std::vector<std::string> parts;
  for (size_t r = 0; r < lengths.size(); ++r)
    parts.push_back(to_string(rows[static_cast<int64_t>(r)].narrow(0, 0, lengths[r])));
  return parts;
}

template <typename From, typename Function>
auto map(const std::vector<From>& from, Function function) {
  std::vector<decltype(function(from.front()))> to;
  to.reserve(from.size());
  for (const auto& element : from) to.push_back(function(element));
  return to;
}

std::vector<std::string> gathered(const Group& group, std::string_view bytes, const std::vector<int64_t>& lengths,
                                  int root) {
  const at::Tensor rows = group.gather(padded(bytes, *std::max_element(lengths.begin(), lengths.end())), root);
  if (group.rank() != root) return {};
  return cut(rows, lengths);
}

bool any_empty(const std::vector<std::string>& texts) {
  return std::any_of(texts.begin(), texts.end(), [](const std::string& text) { return text.empty(); });
}

}  // namespace

double Group::mean(double value) const {
  const at::Tensor number = at::tensor({value}, at::kDouble);
  all_reduce(number, ReduceOp::kMean);
  return number.item<double>();
}

std::string Group::broadcast_bytes(std::string_view bytes, int root) const {
  const CallGuard guard = state_->enter("broadcast_bytes");
  const CalledAsGuard called_as_guard(shm::CalledAs::kBroadcastBytes);
  at::Tensor length = to_tensor(std::vector<int64_t>{static_cast<int64_t>(bytes.size())});
  broadcast(length, root);
  at::Tensor content = rank() == root ? to_tensor(bytes) : at::empty({length.item<int64_t>()}, at::kByte);
  broadcast(content, root);
  return to_string(content);
}

std::vector<std::string> Group::all_gather_bytes(std::string_view bytes) const {
  const CallGuard guard = state_->enter("all_gather_bytes");
  const CalledAsGuard called_as_guard(shm::CalledAs::kAllGatherBytes);
  const auto lengths = all_lengths(*this, bytes, CallGuard::operation(state_->caller));
  return cut(all_gather(padded(bytes, *std::max_element(lengths.begin(), lengths.end()))), lengths);
}

std::vector<std::string> Group::gather_bytes(std::string_view bytes, int root) const {
  const CallGuard guard = state_->enter("gather_bytes");
  const CalledAsGuard called_as_guard(shm::CalledAs::kGatherBytes);
  return gathered(*this, bytes, all_lengths(*this, bytes, "gather_bytes"), root);
}

std::string Group::scatter_bytes(const std::vector<std::string>& bytes, int root) const {
  const CallGuard guard = state_->enter("scatter_bytes");
  const CalledAsGuard called_as_guard(shm::CalledAs::kScatterBytes);
  check_peer("scatter_bytes", root);
  at::Tensor lengths = at::zeros({world_size()}, at::kLong);
  if (rank() == root) {
    TORCH_CHECK(static_cast<int>(bytes.size()) == world_size(), "scatter: the root has ", bytes.size(),
                " objects for a group of ", world_size(), " ranks; pass one for each rank");
    lengths = to_tensor(map(bytes, [](const std::string& b) { return static_cast<int64_t>(b.size()); }));
  }
  broadcast(lengths, root);
  const int64_t longest = lengths.max().item<int64_t>();
  if (longest == 0) return "";
  at::Tensor rows;
  if (rank() == root) rows = at::stack(map(bytes, [&](const std::string& b) { return padded(b, longest); }));
  at::Tensor row = at::empty({longest}, at::kByte);
  scatter(row, rows, root);
  return to_string(row.narrow(0, 0, lengths[rank()].item<int64_t>()));
}

c10::IValue Group::broadcast_object(const c10::IValue& object, int root) const {
  const CallGuard guard = state_->enter("broadcast_object");
  const CalledAsGuard called_as_guard(shm::CalledAs::kBroadcastObject);
  const Pickled mine = rank() == root ? pickle(object) : Pickled{};
  const std::string bytes = broadcast_bytes(mine.bytes, root);
  if (bytes.empty()) refuse_together(*this, "broadcast_object", mine.problem);
  return unpickle(bytes);
}

std::vector<c10::IValue> Group::all_gather_object(const c10::IValue& object) const {
  const CallGuard guard = state_->enter("all_gather_object");
  const CalledAsGuard called_as_guard(shm::CalledAs::kAllGatherObject);
  const Pickled mine = pickle(object);
  const auto bytes = all_gather_bytes(mine.bytes);
  if (any_empty(bytes)) refuse_together(*this, "all_gather_object", mine.problem);
  return map(bytes, unpickle);
}

std::vector<c10::IValue> Group::gather_object(const c10::IValue& object, int root) const {
  const CallGuard guard = state_->enter("gather_object");
  const CalledAsGuard called_as_guard(shm::CalledAs::kGatherObject);
  const Pickled mine = pickle(object);
  const auto lengths = all_lengths(*this, mine.bytes, "gather_object");
  if (std::find(lengths.begin(), lengths.end(), 0) != lengths.end())
    refuse_together(*this, "gather_object", mine.problem);
  return map(gathered(*this, mine.bytes, lengths, root), unpickle);
}

c10::IValue Group::scatter_object(const std::vector<c10::IValue>& objects, int root) const {
  const CallGuard guard = state_->enter("scatter_object");
  const CalledAsGuard called_as_guard(shm::CalledAs::kScatterObject);
  std::vector<std::string> bytes;
  std::string problem;
  for (size_t i = 0; rank() == root && i < objects.size(); ++i) {
    Pickled one = pickle(objects[i]);
    if (problem.empty()) problem = one.problem;
    bytes.push_back(std::move(one.bytes));
  }
  if (!problem.empty()) std::fill(bytes.begin(), bytes.end(), "");
  const std::string mine = scatter_bytes(bytes, root);
  if (mine.empty()) refuse_together(*this, "scatter_object", problem);
  return unpickle(mine);
}

}  // namespace lockstep
