#include "rank_page/error_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/environment.h"
#include "base/file_descriptor.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

constexpr size_t kMostBytes = 64 << 10;

std::terminate_handler before = nullptr;

std::string text_of(const std::exception_ptr& thrown) {
  if (thrown == nullptr) return "std::terminate was called";
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

/// `message` is a text, or an object that holds a text under the same name. The rest is ignored.
std::string message_in(const nlohmann::json& json) {
  const nlohmann::json* node = &json;
  for (int depth = 0; depth < 2 && node->is_object() && node->contains("message"); ++depth) node = &node->at("message");
  return node->is_string() ? node->get<std::string>() : "";
}

}  // namespace

void write_error_file(const std::string& text) noexcept {
  try {
    const auto path = Environment::from_process().torchelastic_error_file;
    if (!path) return;
    const nlohmann::json json = {
        {"message",
         {{"message", text},
          {"extraInfo", {{"py_callstack", text}, {"timestamp", std::to_string(std::time(nullptr))}}}}}};
    const std::string bytes = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    // A file that exists already is closer to the cause.
    const FileDescriptor file(::open(path->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (file && ::write(file.get(), bytes.data(), bytes.size()) < 0) return;
  } catch (...) {
    // The process ends in any case, with its own message.
  }
}

std::string read_error_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return "";
  std::string bytes(kMostBytes, '\0');
  const ssize_t count = ::read(file.get(), bytes.data(), bytes.size());
  bytes.resize(count > 0 ? static_cast<size_t>(count) : 0);
  const auto json = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? "" : message_in(json);
}

void note_uncaught_exceptions() {
  static std::once_flag once;
  std::call_once(once, [] {
    before = std::set_terminate([] {
      const std::exception_ptr thrown = std::current_exception();
      const std::string text = text_of(thrown);
      own_page().fail_by_exception(text, thrown != nullptr);
      write_error_file(text);
      if (before != nullptr) before();
    });
  });
}

}  // namespace lockstep
