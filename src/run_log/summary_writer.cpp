#include <lockstep/summary_writer.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <utility>

#include <ATen/ATen.h>
#include <lockstep/context.h>

#include "base/machine_name.h"
#include "observe/events/event_file.h"
#include "observe/events/png.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

EventMoment now_at(int64_t step) { return {.step = step, .wall_s = wall_seconds()}; }

/// runs/Nov21_07-42-01_host, as PyTorch names them.
std::string default_folder() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  std::array<char, 64> time{};
  std::strftime(time.data(), time.size(), "%b%d_%H-%M-%S", &parts);
  return std::string("runs/") + time.data() + "_" + host_name();
}

std::string folder_of(const Context& context, std::string log_dir) {
  if (log_dir.empty()) log_dir = (fs::path(context.run_dir()) / "tensorboard").string();
  return log_dir;
}

Histogram histogram_of(const at::Tensor& values) {
  TORCH_CHECK(values.defined() && values.numel() > 0, "add_histogram: the tensor has no elements");
  TORCH_CHECK(!values.is_complex(), "add_histogram: the tensor is complex; pass its abs() or view_as_real()");
  const at::Tensor flat = values.detach().to(at::kCPU).contiguous();
  if (flat.scalar_type() == at::kFloat) return make_histogram(flat.const_data_ptr<float>(), flat.numel());
  const at::Tensor wide = flat.to(at::kDouble);
  return make_histogram(wide.const_data_ptr<double>(), wide.numel());
}

/// The picture as bytes [H, W, C].
at::Tensor pixels_of(const at::Tensor& image, std::string_view formats) {
  TORCH_CHECK(formats == "CHW" || formats == "HWC" || formats == "HW", "add_image: dataformats is \"",
              std::string(formats), "\"; there are \"CHW\", \"HWC\" and \"HW\"");
  TORCH_CHECK(image.defined() && image.dim() == static_cast<int64_t>(formats.size()) && image.numel() > 0,
              "add_image: a picture of dataformats \"", std::string(formats), "\" has ", formats.size(),
              " dimensions and at least one pixel; this one is of size ",
              image.defined() ? image.sizes() : c10::IntArrayRef());
  at::Tensor pixels = image.detach().to(at::kCPU);
  if (formats == "HW") pixels = pixels.unsqueeze(2);
  if (formats == "CHW") pixels = pixels.permute({1, 2, 0});
  TORCH_CHECK(pixels.size(2) <= 4, "add_image: a picture has 1 to 4 channels, not ", pixels.size(2),
              "; set dataformats if they do not come first");
  constexpr int64_t kMostPixels = int64_t{1} << 28;
  TORCH_CHECK(pixels.size(0) <= kMostPixels && pixels.size(1) <= kMostPixels / pixels.size(0),
              "add_image: a picture has at most 2^28 pixels");
  if (pixels.is_floating_point()) pixels = pixels.to(at::kFloat).mul(255).nan_to_num(0).clamp(0, 255).to(at::kByte);
  TORCH_CHECK(pixels.scalar_type() == at::kByte,
              "add_image: a picture must be uint8, or floating point from 0 to 1; this one is ", pixels.dtype());
  return pixels.contiguous();
}

}  // namespace

struct SummaryWriter::State {
  State(const std::string& folder, SummaryWriterOptions given)
      : options(std::move(given)), file(folder, options.filename_suffix, options.flush_interval) {}

  void add(std::string_view tag, int64_t step, const SummaryContent& content) {
    file.write(summary_event(now_at(step), tag, content));
  }

  const SummaryWriterOptions options;
  EventFile file;
  std::map<std::string, SummaryWriter> parts;  ///< of add_scalars, by folder
};

SummaryWriter::SummaryWriter() noexcept = default;
SummaryWriter::SummaryWriter(std::string log_dir, SummaryWriterOptions options)
    : state_(std::make_unique<State>(log_dir.empty() ? default_folder() : log_dir, std::move(options))) {}
SummaryWriter::SummaryWriter(const Context& context, std::string log_dir, SummaryWriterOptions options) {
  if (!context.is_main() && !options.every_rank) return;
  if (options.every_rank) options.filename_suffix += ".rank" + std::to_string(context.rank());
  state_ = std::make_unique<State>(folder_of(context, std::move(log_dir)), std::move(options));
}
SummaryWriter::SummaryWriter(SummaryWriter&&) noexcept = default;
SummaryWriter& SummaryWriter::operator=(SummaryWriter&&) noexcept = default;
SummaryWriter::~SummaryWriter() = default;

void SummaryWriter::add_scalar(std::string_view tag, double value, int64_t step) {
  if (state_) state_->add(tag, step, static_cast<float>(value));
}

void SummaryWriter::add_scalars(const std::string& main_tag, const std::map<std::string, double>& values,
                                int64_t step) {
  if (!state_) return;
  for (const auto& [name, value] : values) {
    std::string folder = main_tag + "_" + name;
    std::replace(folder.begin(), folder.end(), '/', '_');
    auto part = state_->parts.find(folder);
    if (part == state_->parts.end())
      part = state_->parts
                 .emplace(folder, SummaryWriter((fs::path(state_->file.folder()) / folder).string(), state_->options))
                 .first;
    part->second.add_scalar(main_tag, value, step);
  }
}

void SummaryWriter::add_histogram(std::string_view tag, const at::Tensor& values, int64_t step) {
  if (!state_) return;
  const Histogram histogram = histogram_of(values);
  state_->add(tag, step, &histogram);
}

void SummaryWriter::add_image(std::string_view tag, const at::Tensor& image, int64_t step,
                              std::string_view dataformats) {
  if (!state_) return;
  const at::Tensor pixels = pixels_of(image, dataformats);
  Picture picture{.width = static_cast<uint32_t>(pixels.size(1)),
                  .height = static_cast<uint32_t>(pixels.size(0)),
                  .channels = static_cast<uint32_t>(pixels.size(2)),
                  .pixels = {}};
  picture.pixels.assign(static_cast<const char*>(pixels.const_data_ptr()), static_cast<size_t>(pixels.numel()));
  state_->add(tag, step, PngImage{picture.width, picture.height, picture.channels, encode_png(picture)});
}

void SummaryWriter::add_text(std::string_view tag, std::string_view text, int64_t step) {
  if (state_) state_->add(std::string(tag) + "/text_summary", step, TextContent{text});
}

void SummaryWriter::add_hparams(const std::map<std::string, Hparam>& hparams,
                                const std::map<std::string, double>& metrics, std::string run_name, int64_t step) {
  if (!state_) return;
  const EventMoment at = now_at(step);
  if (run_name.empty()) run_name = std::to_string(at.wall_s);
  SummaryWriter run((fs::path(state_->file.folder()) / run_name).string(), state_->options);
  HparamsMessages messages = encode_hparams(hparams, metrics, at.wall_s);
  run.state_->add("_hparams_/experiment", step, HparamsContent{std::move(messages.experiment)});
  run.state_->add("_hparams_/session_start_info", step, HparamsContent{std::move(messages.session_start)});
  run.state_->add("_hparams_/session_end_info", step, HparamsContent{std::move(messages.session_end)});
  for (const auto& [name, value] : metrics) run.add_scalar(name, value, step);
}

void SummaryWriter::purge_from(int64_t step) {
  if (state_) state_->file.write(session_start_event(now_at(step)));
}

void SummaryWriter::flush() {
  if (!state_) return;
  state_->file.flush();
  for (auto& [folder, part] : state_->parts) part.flush();
}

const std::string& SummaryWriter::log_dir() const {
  static const std::string none;
  return state_ ? state_->file.folder() : none;
}

}  // namespace lockstep
