#include "checkpoint/format/pickle_machine.h"

#include "base/error.h"
#include "checkpoint/format/pickle_tree.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw RefusedInput(what); }

}  // namespace

NodeId PickleMachine::push_new(NodeKind kind) {
  const NodeId id = calls_.make(kind);
  stack_.push_back(id);
  return id;
}

NodeId PickleMachine::top() const {
  if (stack_.empty() || calls_.at(stack_.back()).kind == NodeKind::kMark)
    refuse("it pops more from its stack than it has pushed");
  return stack_.back();
}

NodeId PickleMachine::pop() {
  const NodeId id = top();
  stack_.pop_back();
  return id;
}

std::vector<NodeId> PickleMachine::pop_to_mark() {
  size_t first = stack_.size();
  while (first > 0 && calls_.at(stack_[first - 1]).kind != NodeKind::kMark) --first;
  if (first == 0) refuse("it refers to a mark that it did not set");
  std::vector<NodeId> items(stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end());
  stack_.resize(first - 1);
  return items;
}

void PickleMachine::push_tuple(std::vector<NodeId> items) {
  tree_.nodes[push_new(NodeKind::kTuple)].items = std::move(items);
}

void PickleMachine::remember(uint64_t place) {
  if (memory_.size() >= kMaxPickleNodes) refuse("it stores too many objects");
  memory_[place] = top();
}

void PickleMachine::recall(uint64_t place) {
  const auto found = memory_.find(place);
  if (found == memory_.end()) refuse("it loads object " + std::to_string(place) + ", which it did not store");
  push(found->second);
}

void PickleMachine::global(std::string_view module, std::string_view name) {
  const std::string full = std::string(module.substr(0, 100)) + "." + std::string(name.substr(0, 100));
  const Global found = global_of(module, name);
  if (found == Global::kUnknown)
    refuse("it names `" + full + "`, which is not among the classes and functions that are known to be harmless; " +
           "nothing was executed. Save a state_dict(), or plain tensors, numbers, strings, lists and dictionaries");
  if (found == Global::kUnsupportedTensor)
    refuse("it names `" + full +
           "`: quantized, sparse, nested, meta and sub-byte tensors and subclasses of Tensor "
           "are not read; convert them to plain tensors in Python");
  if (found == Global::kDtype) {
    push_text(NodeKind::kDtype, dtype_of_name(name)->name);
    return;
  }
  const NodeId id = push_new(NodeKind::kGlobal);
  tree_.nodes[id].integer = static_cast<int64_t>(found);
  tree_.nodes[id].text = name;
}

void PickleMachine::add_to_list(const std::vector<NodeId>& items) {
  Node& list = tree_.nodes[top()];
  if (list.kind != NodeKind::kList) refuse("it appends to something that is not a list");
  list.items.insert(list.items.end(), items.begin(), items.end());
}

void PickleMachine::add_to_set(const std::vector<NodeId>& items) {
  Node& set = tree_.nodes[top()];
  if (set.kind != NodeKind::kSet) refuse("it adds to something that is not a set");
  set.items.insert(set.items.end(), items.begin(), items.end());
}

void PickleMachine::add_to_dict(const std::vector<NodeId>& items) {
  Node& dict = tree_.nodes[top()];
  if (dict.kind != NodeKind::kDict) refuse("it sets an item of something that is not a dictionary");
  if (items.size() % 2 != 0) refuse("it sets a key of a dictionary without a value");
  dict.items.insert(dict.items.end(), items.begin(), items.end());
}

void PickleMachine::load_storage() { push(calls_.storage(pop())); }

void PickleMachine::reduce() {
  const std::vector<NodeId> arguments = calls_.expect(pop(), NodeKind::kTuple, "arguments").items;
  const NodeId callee = pop();
  const Global called = calls_.global_at(callee);
  if (called == Global::kUnknown) refuse("it calls an unknown function");
  push(calls_.call(called, arguments));
}

void PickleMachine::build() {
  const NodeId state = pop();
  const Node& object = calls_.at(top());
  switch (object.kind) {
    case NodeKind::kDict:
      return;  // attributes of an OrderedDict, such as state_dict's _metadata, on which no tensor depends
    case NodeKind::kNumpyDtype: {
      const auto& items = calls_.expect(state, NodeKind::kTuple, "the state of a numpy.dtype").items;
      if (items.size() < 2 ||
          (calls_.at(items[1]).text != "<" && calls_.at(items[1]).text != "|" && calls_.at(items[1]).text != "="))
        refuse("a numpy scalar is not little-endian");
      return;
    }
    default:
      refuse("it sets attributes of an object that has none");
  }
}

NodeId PickleMachine::finish() {
  const NodeId root = pop();
  if (!stack_.empty()) refuse("it leaves objects on its stack");
  return root;
}

}  // namespace lockstep
