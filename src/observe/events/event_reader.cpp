#include "observe/events/event_reader.h"

#include <lockstep/error.h>

#include <algorithm>
#include <cstring>
#include <protozero/pbf_reader.hpp>

#include "observe/events/crc32c.h"

namespace lockstep {
namespace {

using protozero::pbf_reader;
using protozero::pbf_wire_type;
using protozero::tag_and_type;

constexpr uint64_t kMostValues = 100'000;  // in one event

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i - 1]);
  return value;
}

/// SummaryMetadata: the name of the plugin.
std::string plugin_of(pbf_reader metadata) {
  std::string name;
  while (metadata.next(1, pbf_wire_type::length_delimited)) {
    pbf_reader data = metadata.get_message();
    while (data.next(1, pbf_wire_type::length_delimited)) name = data.get_string();
  }
  return name;
}

/// TensorProto: its only number, for scalars written by TensorFlow 2.
std::optional<double> number_of(pbf_reader tensor) {
  constexpr int32_t kFloat = 1, kDouble = 2;
  int32_t dtype = 0;
  std::string content;
  std::optional<double> number;
  while (tensor.next()) {
    switch (tensor.tag_and_type()) {
      case tag_and_type(1, pbf_wire_type::varint):
        dtype = tensor.get_enum();
        break;
      case tag_and_type(4, pbf_wire_type::length_delimited):
        content = tensor.get_bytes();
        break;
      case tag_and_type(5, pbf_wire_type::length_delimited):
        for (const float value : tensor.get_packed_float()) number = value;
        break;
      case tag_and_type(5, pbf_wire_type::fixed32):
        number = tensor.get_float();
        break;
      case tag_and_type(6, pbf_wire_type::length_delimited):
        for (const double value : tensor.get_packed_double()) number = value;
        break;
      case tag_and_type(6, pbf_wire_type::fixed64):
        number = tensor.get_double();
        break;
      default:
        tensor.skip();
    }
  }
  const auto from_content = [&](auto value) {
    if (content.size() == sizeof(value)) std::memcpy(&value, content.data(), sizeof(value)), number = value;
  };
  if (!number && dtype == kFloat) from_content(float{});
  if (!number && dtype == kDouble) from_content(double{});
  return number;
}

/// Summary.Value
SummaryValue decode_value(pbf_reader message) {
  SummaryValue value;
  std::string plugin;
  std::optional<double> number;
  while (message.next()) {
    switch (message.tag_and_type()) {
      case tag_and_type(1, pbf_wire_type::length_delimited):
        value.tag = message.get_string();
        break;
      case tag_and_type(2, pbf_wire_type::fixed32):
        value.kind = SummaryKind::kScalar;
        value.number = message.get_float();
        break;
      case tag_and_type(4, pbf_wire_type::length_delimited):
        value.kind = SummaryKind::kImage, message.skip();
        break;
      case tag_and_type(5, pbf_wire_type::length_delimited):
        value.kind = SummaryKind::kHistogram, message.skip();
        break;
      case tag_and_type(8, pbf_wire_type::length_delimited):
        number = number_of(message.get_message());
        break;
      case tag_and_type(9, pbf_wire_type::length_delimited):
        plugin = plugin_of(message.get_message());
        break;
      default:
        message.skip();
    }
  }
  if (plugin == "text") value.kind = SummaryKind::kText;
  if (plugin == "histograms") value.kind = SummaryKind::kHistogram;
  if (plugin == "images") value.kind = SummaryKind::kImage;
  if (plugin == "scalars" && number) {
    value.kind = SummaryKind::kScalar;
    value.number = *number;
  }
  return value;
}

bool is_session_start(pbf_reader session) {
  constexpr int32_t kStart = 1;
  int32_t status = 0;
  while (session.next(1, pbf_wire_type::varint)) status = session.get_enum();
  return status == kStart;
}

}  // namespace

Event decode_event(std::string_view message) try {
  Event event;
  pbf_reader reader(message.data(), message.size());
  while (reader.next()) {
    switch (reader.tag_and_type()) {
      case tag_and_type(1, pbf_wire_type::fixed64):
        event.wall_s = reader.get_double();
        break;
      case tag_and_type(2, pbf_wire_type::varint):
        event.step = reader.get_int64();
        break;
      case tag_and_type(5, pbf_wire_type::length_delimited): {
        pbf_reader summary = reader.get_message();
        while (summary.next(1, pbf_wire_type::length_delimited)) {
          if (event.values.size() >= kMostValues) throw Error("it holds more than 100,000 values");
          event.values.push_back(decode_value(summary.get_message()));
        }
        break;
      }
      case tag_and_type(7, pbf_wire_type::length_delimited):
        event.starts_session = is_session_start(reader.get_message());
        break;
      default:
        reader.skip();
    }
  }
  return event;
} catch (const protozero::exception& error) {
  throw Error(std::string("it is not an event (") + error.what() + ")");
}

bool EventReader::read(uint64_t count) {
  // Piece by piece, so that a false length allocates no more memory than there are bytes.
  constexpr uint64_t kPiece = 1 << 20;
  bytes_.clear();
  while (bytes_.size() < count) {
    const size_t before = bytes_.size(), piece = static_cast<size_t>(std::min(kPiece, count - before));
    bytes_.resize(before + piece);
    in_->read(bytes_.data() + before, static_cast<std::streamsize>(piece));
    const auto got = static_cast<size_t>(in_->gcount());
    bytes_.resize(before + got);
    if (got < piece) return false;
  }
  return true;
}

std::nullopt_t EventReader::stop(const char* what) {
  trouble_ = "record " + std::to_string(records_ + 1) + " at byte " + std::to_string(record_start_) + " " + what;
  return std::nullopt;
}

std::optional<Event> EventReader::next() {
  if (!trouble_.empty()) return std::nullopt;
  if (!read(12)) {
    if (bytes_.empty()) return std::nullopt;
    return stop("is cut short");
  }
  const uint64_t length = little_endian(std::string_view(bytes_).substr(0, 8));
  if (masked_crc32c(std::string_view(bytes_).substr(0, 8)) != little_endian(std::string_view(bytes_).substr(8)))
    return stop("has a wrong checksum of its length");
  if (length > kMostRecordBytes) return stop("is longer than 64 MiB");
  if (!read(length + 4)) return stop("is cut short");
  const std::string_view message = std::string_view(bytes_).substr(0, length);
  if (masked_crc32c(message) != little_endian(std::string_view(bytes_).substr(length)))
    return stop("has a wrong checksum");
  try {
    Event event = decode_event(message);
    ++records_;
    record_start_ += length + 16;
    return event;
  } catch (const Error& error) {
    return stop(("cannot be read: " + std::string(error.what())).c_str());
  }
}

}  // namespace lockstep
