#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>

#include "observe/events/histogram.h"

namespace lockstep {

// The messages of TensorBoard's event files (event.proto, summary.proto, the plugins' own), encoded without
// libprotobuf.

struct EventMoment {
  int64_t step = 0;
  double wall_s = 0;  ///< seconds since 1970
};

/// The first event of every file.
std::string version_event(double wall_s);
/// Training starts or resumes at this step: events of later steps in earlier files of the folder are void.
std::string session_start_event(EventMoment at);

/// Contents of summaries, apart from the tag.
struct PngImage {
  uint32_t width, height, channels;
  std::string file;
};
struct TextContent {
  std::string_view markdown;
};
/// A summary of the hyperparameter plugin, whose only content is its metadata.
struct HparamsContent {
  std::string plugin_data;
};
using SummaryContent = std::variant<float, const Histogram*, PngImage, TextContent, HparamsContent>;

std::string summary_event(EventMoment at, std::string_view tag, const SummaryContent& content);

using HparamValue = std::variant<bool, int64_t, double, std::string>;
using Hparams = std::map<std::string, HparamValue>;

/// The hyperparameter plugin's three messages.
struct HparamsMessages {
  std::string experiment, session_start, session_end;
};
HparamsMessages encode_hparams(const Hparams& hparams, const std::map<std::string, double>& metrics, double wall_s);

/// A record of an event file: length, masked checksum of the length, message, masked checksum of the message.
void append_record(std::string& out, std::string_view message);

}  // namespace lockstep
