#pragma once

#include <istream>
#include <string>

namespace lockstep {

/// The lines of an untrusted file: none longer than kMostBytes is kept.
class BoundedLines {
 public:
  static constexpr size_t kMostBytes = 4 << 20;

  explicit BoundedLines(std::istream& in) : in_(&in) {}

  /// Gets the next line; false at the end. A line that is too long comes out empty, and is_too_long() is true.
  bool next(std::string& line) {
    line.clear();
    too_long_ = false;
    std::streambuf* buffer = in_->rdbuf();
    bool any = false;
    for (int c = buffer->sbumpc(); c != std::char_traits<char>::eof(); c = buffer->sbumpc()) {
      any = true;
      if (c == '\n') return true;
      if (too_long_) continue;
      line += static_cast<char>(c);
      if (line.size() > kMostBytes) {
        too_long_ = true;
        line.clear();
      }
    }
    return any;
  }
  bool is_too_long() const { return too_long_; }

 private:
  std::istream* in_;
  bool too_long_ = false;
};

}  // namespace lockstep
