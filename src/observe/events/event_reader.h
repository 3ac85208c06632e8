#pragma once

#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The kind of value in a summary of an event.
enum class SummaryKind { kScalar, kHistogram, kImage, kText, kOther };

struct SummaryValue {
  std::string tag;
  SummaryKind kind = SummaryKind::kOther;
  double number = 0;  ///< kScalar
};

struct Event {
  double wall_s = 0;
  int64_t step = 0;
  bool starts_session = false;
  std::vector<SummaryValue> values;
};

/// Reads an event file of any writer, record by record. Hostile bytes cannot make it allocate more memory than
/// kMostRecordBytes or than the stream really holds.
class EventReader {
 public:
  static constexpr uint64_t kMostRecordBytes = 64 << 20;

  explicit EventReader(std::istream& in) : in_(&in) {}

  /// The next event; nothing at the end of the file or of its readable part.
  std::optional<Event> next();
  /// The reason why reading ended before the end of the file, e.g. "record 3 at byte 211 has a wrong checksum"; empty
  /// if it did not.
  const std::string& trouble() const { return trouble_; }

 private:
  /// Reads `count` bytes into bytes_; at the end of the stream sets the trouble and returns false.
  bool read(uint64_t count);
  std::nullopt_t stop(const char* what);

  std::istream* in_;
  std::string bytes_;
  int64_t records_ = 0;
  uint64_t record_start_ = 0;
  std::string trouble_;
};

/// Decodes one event from its message. Throws Error if it is not one.
Event decode_event(std::string_view message);

}  // namespace lockstep
