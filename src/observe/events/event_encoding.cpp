#include "observe/events/event_encoding.h"

#include <protozero/pbf_writer.hpp>

#include "observe/events/crc32c.h"

// Field numbers are those of the .proto files named next to them.

namespace lockstep {
namespace {

using protozero::pbf_writer;

std::string begin_event(EventMoment at) {  // event.proto, Event
  std::string event;
  pbf_writer writer(event);
  writer.add_double(1, at.wall_s);
  writer.add_int64(2, at.step);
  return event;
}

/// summary.proto, SummaryMetadata with the name of the plugin that shows it
void add_metadata(pbf_writer& value, const char* plugin, const std::string& content) {
  pbf_writer metadata(value, 9);
  pbf_writer data(metadata, 1);
  data.add_string(1, plugin);
  if (!content.empty()) data.add_bytes(2, content);
}

/// summary.proto, Summary.Value
struct ContentWriter {
  pbf_writer& value;

  void operator()(float number) const { value.add_float(2, number); }

  void operator()(const Histogram* histogram) const {  // HistogramProto
    pbf_writer message(value, 5);
    message.add_double(1, histogram->min);
    message.add_double(2, histogram->max);
    message.add_double(3, static_cast<double>(histogram->count));
    message.add_double(4, histogram->sum);
    message.add_double(5, histogram->sum_of_squares);
    message.add_packed_double(6, histogram->limits.begin(), histogram->limits.end());
    message.add_packed_double(7, histogram->counts.begin(), histogram->counts.end());
  }

  void operator()(const PngImage& image) const {  // Image
    pbf_writer message(value, 4);
    message.add_int32(1, static_cast<int32_t>(image.height));
    message.add_int32(2, static_cast<int32_t>(image.width));
    message.add_int32(3, static_cast<int32_t>(image.channels));
    message.add_bytes(4, image.file);
  }

  void operator()(const TextContent& text) const {  // tensor.proto, TensorProto of one string
    constexpr int32_t kStringType = 7;
    add_metadata(value, "text", "");
    pbf_writer tensor(value, 8);
    tensor.add_enum(1, kStringType);
    {
      pbf_writer shape(tensor, 2);
      pbf_writer dimension(shape, 2);
      dimension.add_int64(1, 1);
    }
    tensor.add_bytes(8, text.markdown.data(), text.markdown.size());
  }

  void operator()(const HparamsContent& content) const { add_metadata(value, "hparams", content.plugin_data); }
};

/// plugins/hparams/api.proto, HParamInfo
void add_hparam_info(pbf_writer& experiment, const std::string& name, const HparamValue& hparam) {
  constexpr int32_t kTypes[] = {2, 3, 3, 1};  // bool, number, number, string
  pbf_writer info(experiment, 4);
  info.add_string(1, name);
  info.add_enum(4, kTypes[hparam.index()]);
}

/// plugins/hparams/plugin_data.proto, an entry of SessionStartInfo.hparams: a name and a google.protobuf.Value
void add_hparam(pbf_writer& start, const std::string& name, const HparamValue& hparam) {
  pbf_writer entry(start, 1);
  entry.add_string(1, name);
  pbf_writer value(entry, 2);
  if (const bool* flag = std::get_if<bool>(&hparam)) value.add_bool(4, *flag);
  if (const int64_t* number = std::get_if<int64_t>(&hparam)) value.add_double(2, static_cast<double>(*number));
  if (const double* number = std::get_if<double>(&hparam)) value.add_double(2, *number);
  if (const std::string* text = std::get_if<std::string>(&hparam)) value.add_string(3, *text);
}

void append_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

}  // namespace

std::string version_event(double wall_s) {
  std::string event = begin_event({.step = 0, .wall_s = wall_s});
  pbf_writer(event).add_string(3, "brain.Event:2");
  return event;
}

std::string session_start_event(EventMoment at) {
  constexpr int32_t kStart = 1;
  std::string event = begin_event(at);
  pbf_writer writer(event);
  pbf_writer session(writer, 7);
  session.add_enum(1, kStart);
  return event;
}

std::string summary_event(EventMoment at, std::string_view tag, const SummaryContent& content) {
  std::string event = begin_event(at);
  pbf_writer writer(event);
  pbf_writer summary(writer, 5);
  pbf_writer value(summary, 1);
  value.add_string(1, tag.data(), tag.size());
  std::visit(ContentWriter{value}, content);
  value.commit();
  summary.commit();
  return event;
}

HparamsMessages encode_hparams(const Hparams& hparams, const std::map<std::string, double>& metrics, double wall_s) {
  constexpr int32_t kSuccess = 1;
  HparamsMessages messages;
  {
    pbf_writer data(messages.experiment);
    pbf_writer experiment(data, 2);
    experiment.add_double(3, wall_s);
    for (const auto& [name, value] : hparams) add_hparam_info(experiment, name, value);
    for (const auto& [name, value] : metrics) {
      pbf_writer metric(experiment, 5);
      pbf_writer metric_name(metric, 1);
      metric_name.add_string(2, name);
    }
  }
  {
    pbf_writer data(messages.session_start);
    pbf_writer start(data, 3);
    for (const auto& [name, value] : hparams) add_hparam(start, name, value);
    start.add_double(5, wall_s);
  }
  {
    pbf_writer data(messages.session_end);
    pbf_writer end(data, 4);
    end.add_enum(1, kSuccess);
    end.add_double(2, wall_s);
  }
  return messages;
}

void append_record(std::string& out, std::string_view message) {
  std::string length;
  append_little_endian(length, message.size(), 8);
  out += length;
  append_little_endian(out, masked_crc32c(length), 4);
  out += message;
  append_little_endian(out, masked_crc32c(message), 4);
}

}  // namespace lockstep
