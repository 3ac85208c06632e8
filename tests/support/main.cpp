// main() of the test binaries. Every test runs in its own process, as ctest would run it, but that process is a
// fork of one that has loaded the libraries and done nothing else: LibTorch takes up to half a second to load, a fork
// some milliseconds. So a test sees no thread, variable or allocator of another, and one that crashes or hangs
// fails alone.
//
//     --deadline=SECONDS    of each test (300)
//     --part=K/N            every N-th test, from test K on
//     --in_process          all in this process, for a debugger; also what a filter that names one test does
//
// GTEST_TOTAL_SHARDS and GTEST_SHARD_INDEX divide the tests, the usual flags of GoogleTest choose among them.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Exit codes of a test's process. One that ends before its test is done does not have these.
constexpr int kPassedCode = 76, kSkippedCode = 77;

/// Whether `name` fits a pattern of `*`, `?` and plain characters.
bool fits(std::string_view name, std::string_view pattern) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') return fits(name, pattern.substr(1)) || (!name.empty() && fits(name.substr(1), pattern));
  return !name.empty() && (pattern.front() == '?' || pattern.front() == name.front()) &&
         fits(name.substr(1), pattern.substr(1));
}

bool fits_any(const std::string& name, const std::string& patterns) {
  std::istringstream stream(patterns);
  for (std::string pattern; std::getline(stream, pattern, ':');)
    if (fits(name, pattern)) return true;
  return false;
}

/// As GoogleTest's --gtest_filter: patterns, then after a `-` those that are left out.
bool is_chosen(const std::string& name, const std::string& filter) {
  const size_t minus = filter.find('-');
  const std::string wanted = filter.substr(0, minus);
  if (!fits_any(name, wanted.empty() ? "*" : wanted)) return false;
  return minus == std::string::npos || !fits_any(name, filter.substr(minus + 1));
}

size_t take_variable(const char* name, size_t otherwise) {
  const char* value = std::getenv(name);
  const size_t number = value == nullptr ? otherwise : std::strtoul(value, nullptr, 10);
  ::unsetenv(name);
  return number;
}

/// This shard's tests, in the order in which they are written.
std::vector<std::string> chosen_tests() {
  const size_t shards = take_variable("GTEST_TOTAL_SHARDS", 1), shard = take_variable("GTEST_SHARD_INDEX", 0);
  const bool disabled_too = ::testing::GTEST_FLAG(also_run_disabled_tests);
  const std::string filter = ::testing::GTEST_FLAG(filter);
  std::vector<std::string> names;
  size_t found = 0;
  const auto& all = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const auto& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const std::string name = std::string(suite.name()) + "." + suite.GetTestInfo(j)->name();
      const bool disabled = name.rfind("DISABLED_", 0) == 0 || name.find(".DISABLED_") != std::string::npos ||
                            name.find("/DISABLED_") != std::string::npos;
      if ((disabled && !disabled_too) || !is_chosen(name, filter)) continue;
      if (found++ % shards == shard) names.push_back(name);
    }
  }
  return names;
}

enum class End { kPassed, kSkipped, kFailed, kCrashed, kTooLate };

struct Result {
  End end;
  int signal_or_code;
  long ms;
  std::string output;
};

/// A test that runs: its process, which leads a group, and what it and its children print.
class TestProcess {
 public:
  TestProcess(pid_t pid, int output) : pid_(pid), output_(output), start_(Clock::now()) {}

  Result wait(std::chrono::seconds deadline) const {
    const std::optional<int> status = status_within(deadline);
    // What is left of it must not disturb the next one.
    ::kill(-pid_, SIGKILL);
    if (!status) ::waitpid(pid_, nullptr, 0);
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_).count();
    Result result{.end = End::kTooLate, .signal_or_code = 0, .ms = ms, .output = read_output()};
    if (!status) return result;
    if (WIFSIGNALED(*status)) {
      result.end = End::kCrashed;
      result.signal_or_code = WTERMSIG(*status);
    } else {
      result.signal_or_code = WEXITSTATUS(*status);
      result.end = result.signal_or_code == kPassedCode    ? End::kPassed
                   : result.signal_or_code == kSkippedCode ? End::kSkipped
                                                           : End::kFailed;
    }
    return result;
  }

 private:
  /// Empty if the deadline passed first.
  std::optional<int> status_within(std::chrono::seconds deadline) const {
    const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));  // -1: an old kernel
    std::optional<int> status;
    while (!status && Clock::now() - start_ < deadline) {
      pollfd polled{.fd = descriptor, .events = POLLIN, .revents = 0};
      ::poll(&polled, 1, descriptor < 0 ? 2 : 100);
      int word = 0;
      if (::waitpid(pid_, &word, WNOHANG) == pid_) status = word;
    }
    if (descriptor >= 0) ::close(descriptor);
    return status;
  }

  std::string read_output() const {
    std::string text;
    ::lseek(output_, 0, SEEK_SET);
    char buffer[1 << 14];
    for (ssize_t got = 0; (got = ::read(output_, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<size_t>(got));
    ::close(output_);
    return text;
  }

  const pid_t pid_;
  const int output_;
  const Clock::time_point start_;
};

/// Prints why tests were skipped.
void print_skips(const std::string& output) {
  std::istringstream stream(output);
  for (std::string line; std::getline(stream, line);)
    if (line.find("SKIPPED BECAUSE") != std::string::npos) std::puts(line.c_str());
}

/// Prints the output of a test's process, indented, so that GoogleTest's own verdicts in it do not count as ours.
void print_indented(const std::string& output) {
  std::istringstream stream(output);
  for (std::string line; std::getline(stream, line);) std::printf("    %s\n", line.c_str());
}

void print(const std::string& name, const Result& result, std::chrono::seconds deadline) {
  const char* mark = "[       OK ]";
  switch (result.end) {
    case End::kPassed:
      print_skips(result.output);
      break;
    case End::kSkipped:
      mark = "[  SKIPPED ]";
      print_indented(result.output);
      break;
    default:
      mark = "[  FAILED  ]";
      std::printf("[ RUN      ] %s\n", name.c_str());
      print_indented(result.output);
  }
  if (result.end == End::kCrashed)
    std::printf("%s ended by signal %d, %s\n", name.c_str(), result.signal_or_code, ::strsignal(result.signal_or_code));
  if (result.end == End::kFailed && result.signal_or_code == 0)
    std::printf("%s ended before its test was done\n", name.c_str());
  if (result.end == End::kTooLate)
    std::printf("%s was not done after %ld s\n", name.c_str(), static_cast<long>(deadline.count()));
  std::printf("%s %s (%ld ms)\n", mark, name.c_str(), result.ms);
  std::fflush(stdout);
}

/// Every `of_parts`-th test, from test `first` on.
struct Part {
  size_t first = 0, of_parts = 1;

  /// Of "K/N".
  static Part from(const char* text) {
    Part part;
    if (std::sscanf(text, "%zu/%zu", &part.first, &part.of_parts) != 2 || part.of_parts == 0) part = {0, 1};
    return part;
  }
  std::vector<std::string> of(const std::vector<std::string>& names) const {
    std::vector<std::string> chosen;
    for (size_t i = first; i < names.size(); i += of_parts) chosen.push_back(names[i]);
    return chosen;
  }
};

/// The exit code; empty in the process of a test, where --gtest_filter names that test.
std::optional<int> run_each(std::chrono::seconds deadline, const Part& part) {
  const std::vector<std::string> names = part.of(chosen_tests());
  const auto start = Clock::now();
  size_t passed = 0, skipped = 0;
  std::vector<std::string> failed;
  for (const std::string& name : names) {
    std::fflush(nullptr);
    const int output = ::memfd_create("test output", MFD_CLOEXEC);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0 || output < 0) {
      std::perror("cannot start the process of a test");
      return 1;
    }
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      ::setpgid(0, 0);
      ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
      ::dup2(output, STDOUT_FILENO);
      ::dup2(output, STDERR_FILENO);
      ::close(output);
      ::testing::GTEST_FLAG(filter) = name;
      ::testing::GTEST_FLAG(brief) = true;
      return {};
    }
    ::setpgid(pid, pid);
    const Result result = TestProcess(pid, output).wait(deadline);
    print(name, result, deadline);
    if (result.end == End::kPassed)
      ++passed;
    else if (result.end == End::kSkipped)
      ++skipped;
    else
      failed.push_back(name);
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
  for (const std::string& name : failed) std::printf("failed: %s\n", name.c_str());
  std::printf("[==========] %zu tests: %zu passed, %zu failed, %zu skipped (%ld ms)\n", names.size(), passed,
              failed.size(), skipped, static_cast<long>(ms));
  if (names.empty()) std::puts("no test fits the filter");
  return failed.empty() && !names.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  bool in_process = false;
  std::chrono::seconds deadline(300);
  Part part;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    constexpr std::string_view kDeadline = "--deadline=", kPart = "--part=";
    if (argument == "--in_process")
      in_process = true;
    else if (argument.substr(0, kDeadline.size()) == kDeadline)
      deadline = std::chrono::seconds(std::atoi(argv[i] + kDeadline.size()));
    else if (argument.substr(0, kPart.size()) == kPart)
      part = Part::from(argv[i] + kPart.size());
  }
  const std::string filter = ::testing::GTEST_FLAG(filter);
  const std::string output = ::testing::GTEST_FLAG(output);
  in_process = in_process || ::testing::GTEST_FLAG(list_tests) || ::testing::GTEST_FLAG(repeat) != 1 ||
               !output.empty() || filter.find_first_of("*?:-") == std::string::npos;
  if (!in_process) {
    const std::optional<int> code = run_each(deadline, part);
    if (code) return *code;
  }
  const int code = RUN_ALL_TESTS();
  if (in_process || code != 0) return code;
  return ::testing::UnitTest::GetInstance()->skipped_test_count() > 0 ? kSkippedCode : kPassedCode;
}
