#pragma once

#include <lockstep/cxx20.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>

#include <ATen/core/Tensor.h>

namespace lockstep {

class Context;

struct SummaryWriterOptions {
  /// Appended to the file's name.
  std::string filename_suffix{};
  /// The longest time that an event waits in memory if others follow it.
  std::chrono::milliseconds flush_interval = std::chrono::seconds(2);
  /// With a Context: write on every rank, each to its own file, instead of on rank 0 only.
  bool every_rank = false;
};

/// Writes files for TensorBoard (`tensorboard --logdir FOLDER`), like PyTorch's SummaryWriter, but without libprotobuf.
///
/// Each writer makes one new event file in its folder. Used by one thread. If the disk is full, events are lost and a
/// message on stderr says so once; it never throws. Slashes in tags group them. `step` is any number that grows.
class SummaryWriter {
 public:
  using Hparam = std::variant<bool, int64_t, double, std::string>;

  /// Writes nothing.
  SummaryWriter() noexcept;
  /// Writes to `log_dir` on every rank; in a program with several ranks, pass the context instead. Empty:
  /// runs/<month><day>_<hour>-<minute>-<second>_<host>. Throws Error if the file cannot be made.
  explicit SummaryWriter(std::string log_dir, SummaryWriterOptions options = {});
  /// Writes on rank 0; on other ranks calls do nothing. Empty `log_dir`: the subfolder tensorboard of the launcher's
  /// run folder, or of the current folder. Every rank may construct one; they do not communicate.
  explicit SummaryWriter(const Context& context, std::string log_dir = "", SummaryWriterOptions options = {});
  SummaryWriter(SummaryWriter&&) noexcept;
  SummaryWriter& operator=(SummaryWriter&&) noexcept;
  /// Flushes.
  ~SummaryWriter();

  /// Stored as float32, as TensorBoard does.
  void add_scalar(std::string_view tag, double value, int64_t step = 0);
  /// Several curves in one chart: each is a separate run, in the folder <log_dir>/<main_tag>_<name>.
  void add_scalars(const std::string& main_tag, const std::map<std::string, double>& values, int64_t step = 0);
  /// The distribution of all elements, in TensorBoard's buckets. Takes a real tensor of any shape, with at least one
  /// element, on any device. Leaves NaN out.
  void add_histogram(std::string_view tag, const at::Tensor& values, int64_t step = 0);
  /// A picture [C, H, W] of 1 (gray), 2 (gray, alpha), 3 (RGB) or 4 (RGBA) channels: uint8, or floating point from 0 to
  /// 1. `dataformats` gives another order, "HWC" or "HW".
  void add_image(std::string_view tag, const at::Tensor& image, int64_t step = 0, std::string_view dataformats = "CHW");
  /// Markdown.
  void add_text(std::string_view tag, std::string_view text, int64_t step = 0);
  /// Settings of a run and its results, for TensorBoard's table of runs. They are a separate run, in the folder
  /// <log_dir>/<run_name>, by default named after the time.
  void add_hparams(const std::map<std::string, Hparam>& hparams, const std::map<std::string, double>& metrics,
                   std::string run_name = "", int64_t step = 0);
  /// Discards events of this step and later ones in this folder's earlier files: for runs that resume from a
  /// checkpoint.
  void purge_from(int64_t step);

  void flush();
  /// Whether this rank writes.
  bool is_on() const { return state_ != nullptr; }
  /// Empty if nothing is written.
  const std::string& log_dir() const;

 private:
  struct State;
  std::unique_ptr<State> state_;  // null: writes nothing
};

}  // namespace lockstep
