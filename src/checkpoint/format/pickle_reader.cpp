#include "checkpoint/format/pickle_tree.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "checkpoint/format/pickle_machine.h"

// Source: Python's Lib/pickletools.py, which documents every opcode.

namespace lockstep {
namespace {

constexpr int kMaxProtocol = 5;
constexpr size_t kMaxNameBytes = 1000;

class PickleReader {
 public:
  explicit PickleReader(PickleTree& tree) : tree_(tree), text_(tree.pickle), machine_(tree) {}

  void read() {
    try {
      while (step()) {
      }
    } catch (const Error& error) {
      throw RefusedInput("its pickle is refused at byte " + std::to_string(start_) + " of " +
                         std::to_string(text_.size()) + ": " + error.what());
    }
  }

 private:
  std::string_view take(uint64_t count) {
    if (count > text_.size() - at_) throw RefusedInput("it is truncated");
    const std::string_view bytes = text_.substr(at_, count);
    at_ += count;
    return bytes;
  }

  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  std::string_view line() {
    const size_t end = text_.find('\n', at_);
    if (end == std::string_view::npos || end - at_ > kMaxNameBytes) throw RefusedInput("a name has no end");
    const std::string_view name = take(end - at_);
    ++at_;
    return name;
  }

  /// Little-endian two's complement.
  void push_long(std::string_view bytes) {
    if (bytes.size() > 8) throw RefusedInput("a whole number has more than 64 bits");
    uint64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
    machine_.push_int(static_cast<int64_t>(value));
  }

  void push_bool(bool value) { tree_.nodes[machine_.push_new(NodeKind::kBool)].integer = value ? 1 : 0; }

  void push_real() {
    const uint64_t bits = __builtin_bswap64(number<uint64_t>());  // big-endian, the only such number in a pickle
    tree_.nodes[machine_.push_new(NodeKind::kReal)].real = std::bit_cast<double>(bits);
  }

  void push_last_as_tuple(size_t count) {
    std::vector<NodeId> items(count);
    for (size_t i = count; i-- > 0;) items[i] = machine_.pop();
    machine_.push_tuple(std::move(items));
  }

  void set_item() {
    const NodeId value = machine_.pop(), key = machine_.pop();
    machine_.add_to_dict({key, value});
  }

  void stack_global() {
    const NodeId name = machine_.pop(), module = machine_.pop();
    if (tree_[name].kind != NodeKind::kText || tree_[module].kind != NodeKind::kText)
      throw RefusedInput("a global has no name");
    // The strings may move when nodes are made; the pickle that they point into does not.
    machine_.global(tree_[module].text, tree_[name].text);
  }

  void check_protocol(int protocol) {
    if (protocol < 2 || protocol > kMaxProtocol)
      throw RefusedInput("its protocol is " + std::to_string(protocol) + "; only 2 to 5 are supported");
  }

  /// Executes the next opcode. Returns false at the end.
  bool step() {
    start_ = at_;
    const char opcode = take(1)[0];
    if (constant(opcode) || container(opcode) || memory(opcode)) return true;
    switch (opcode) {
      case '\x80':
        check_protocol(number<uint8_t>());
        return true;
      case '\x95':
        number<uint64_t>();
        return true;  // FRAME: the number of bytes that follow
      case 'c': {
        const std::string_view module = line(), name = line();
        machine_.global(module, name);
        return true;
      }
      case '\x93':
        stack_global();
        return true;
      case 'Q':
        machine_.load_storage();
        return true;
      case 'R':
      case '\x81':
        machine_.reduce();
        return true;  // a new object of a class: OrderedDict.__new__ and the like
      case 'b':
        machine_.build();
        return true;
      case '.':
        tree_.root = machine_.finish();
        return false;
      default:
        throw RefusedInput("opcode " + std::to_string(static_cast<unsigned char>(opcode)) +
                           " is not one that torch.save writes");
    }
  }

  bool constant(char opcode) {
    switch (opcode) {
      case 'N':
        machine_.push_new(NodeKind::kNone);
        return true;
      case '\x88':
        push_bool(true);
        return true;
      case '\x89':
        push_bool(false);
        return true;
      case 'K':
        machine_.push_int(number<uint8_t>());
        return true;
      case 'M':
        machine_.push_int(number<uint16_t>());
        return true;
      case 'J':
        machine_.push_int(number<int32_t>());
        return true;
      case '\x8a':
        push_long(take(number<uint8_t>()));
        return true;
      case '\x8b':
        push_long(take(number<uint32_t>()));
        return true;
      case 'G':
        push_real();
        return true;
      case 'X':
        machine_.push_text(NodeKind::kText, take(number<uint32_t>()));
        return true;
      case '\x8c':
        machine_.push_text(NodeKind::kText, take(number<uint8_t>()));
        return true;
      case '\x8d':
        machine_.push_text(NodeKind::kText, take(number<uint64_t>()));
        return true;
      case 'U':
      case 'C':
        machine_.push_text(NodeKind::kBytes, take(number<uint8_t>()));
        return true;
      case 'B':
        machine_.push_text(NodeKind::kBytes, take(number<uint32_t>()));
        return true;
      case '\x8e':
      case '\x96':
        machine_.push_text(NodeKind::kBytes, take(number<uint64_t>()));
        return true;
      default:
        return false;
    }
  }

  bool container(char opcode) {
    switch (opcode) {
      case '(':
        machine_.push_new(NodeKind::kMark);
        return true;
      case ')':
        machine_.push_tuple({});
        return true;
      case 't':
        machine_.push_tuple(machine_.pop_to_mark());
        return true;
      case '\x85':
        push_last_as_tuple(1);
        return true;
      case '\x86':
        push_last_as_tuple(2);
        return true;
      case '\x87':
        push_last_as_tuple(3);
        return true;
      case ']':
        machine_.push_new(NodeKind::kList);
        return true;
      case 'a': {
        const NodeId item = machine_.pop();
        machine_.add_to_list({item});
        return true;
      }
      case 'e':
        machine_.add_to_list(machine_.pop_to_mark());
        return true;
      case '}':
        machine_.push_new(NodeKind::kDict);
        return true;
      case 's':
        set_item();
        return true;
      case 'u':
        machine_.add_to_dict(machine_.pop_to_mark());
        return true;
      case '\x8f':
        machine_.push_new(NodeKind::kSet);
        return true;
      case '\x90':
        machine_.add_to_set(machine_.pop_to_mark());
        return true;
      default:
        return false;
    }
  }

  bool memory(char opcode) {
    switch (opcode) {
      case 'q':
        machine_.remember(number<uint8_t>());
        return true;
      case 'r':
        machine_.remember(number<uint32_t>());
        return true;
      case '\x94':
        machine_.remember_next();
        return true;
      case 'h':
        machine_.recall(number<uint8_t>());
        return true;
      case 'j':
        machine_.recall(number<uint32_t>());
        return true;
      case '0':
        machine_.pop();
        return true;
      case '1':
        machine_.pop_to_mark();
        return true;
      default:
        return false;
    }
  }

  PickleTree& tree_;
  const std::string_view text_;
  PickleMachine machine_;
  size_t at_ = 0;
  size_t start_ = 0;  ///< of the current opcode
};

}  // namespace

void read_pickle(PickleTree& tree) {
  if (tree.pickle.size() > kMaxPickleBytes)
    throw RefusedInput("its pickle has " + std::to_string(tree.pickle.size()) + " bytes; more than " +
                       std::to_string(kMaxPickleBytes) + " are not read");
  // Unused memory is never touched, and growing would need the old and the new memory at once.
  tree.nodes.reserve(std::min<size_t>(kMaxPickleNodes, tree.pickle.size() / 4));
  PickleReader(tree).read();
}

}  // namespace lockstep
