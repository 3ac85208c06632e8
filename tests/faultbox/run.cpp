#include "faultbox/run.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <stdexcept>

#include "base/clock.h"
#include "base/error.h"
#include "checkpoint/format/checkpoint_folder.h"

extern char** environ;

namespace lockstep::faultbox {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMostLines = 10000;
constexpr milliseconds kGoneIn(1000);
/// A sleep that ends later than this after its time shows that the machine is busy.
constexpr int64_t kPunctual = 10'000'000;

std::mutex launchers_mutex;
std::set<pid_t> launchers;  // guarded by launchers_mutex

bool is_launchers(std::string_view variable) {
  for (const std::string_view name : {"RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "LOCKSTEP_", "TORCHELASTIC_",
                                      "OMPI_", "PMI", "SLURM_", "FAULTBOX_"})
    if (variable.starts_with(name)) return true;
  return false;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

FaultPage* map_page(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!file || ::ftruncate(file.get(), sizeof(FaultPage)) != 0) throw std::runtime_error("cannot make " + path);
  void* memory = ::mmap(nullptr, sizeof(FaultPage), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + path);
  return static_cast<FaultPage*>(memory);
}

}  // namespace

std::set<pid_t> running_launchers() {
  const std::lock_guard lock(launchers_mutex);
  return launchers;
}

Run::Run(RunPlan plan) : plan_(std::move(plan)) {
  if (!plan_.folder) plan_.folder = std::make_shared<TemporaryFolder>();
  mark_ = "FAULTBOX_MARK=" + folder()->path().string();
  page_ = map_page(path("page"));
  std::filesystem::create_directories(path("run"));
  start();
}

Run::~Run() {
  if (!ended()) wait(milliseconds(0));
  for (const pid_t left : processes()) ::kill(left, SIGKILL);
  ::munmap(page_, sizeof(FaultPage));
}

void Run::start() {
  std::vector<std::string> words = plan_.launcher;
  if (words.empty()) {
    words = {LOCKSTEP_BIN_DIR "/lockstep", "run", "-n", std::to_string(plan_.ranks), "--run-dir", path("run")};
    words.insert(words.end(), plan_.options.begin(), plan_.options.end());
    words.emplace_back("--");
  }
  words.insert(words.end(), plan_.program.begin(), plan_.program.end());
  if (plan_.program.empty()) {
    words.emplace_back(LOCKSTEP_BIN_DIR "/faultbox_rank");
    words.insert(words.end(), {"page=" + path("page"), "result=" + path("result")});
    words.insert(words.end(), plan_.words.begin(), plan_.words.end());
  }
  std::vector<std::string> block;
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (!is_launchers(*variable)) block.emplace_back(*variable);
  block.push_back(mark_);
  const auto argv = pointers(words), envp = pointers(block);

  std::array<int, 2> out{}, err{};
  if (plan_.terminal) {
    const winsize size{.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
    if (::openpty(&out[0], &out[1], nullptr, nullptr, &size) != 0) throw std::runtime_error("openpty failed");
    for (const int fd : out) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  } else if (::pipe2(out.data(), O_CLOEXEC) != 0) {
    throw std::runtime_error("pipe2 failed");
  }
  if (::pipe2(err.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  started_ns_ = now_ns();
  {
    const std::lock_guard lock(launchers_mutex);
    pid_ = ::fork();
    if (pid_ == 0) become(argv.data(), envp.data(), out[1], err[1]);
    if (pid_ > 0) launchers.insert(pid_);
  }
  ::close(out[1]);
  ::close(err[1]);
  out_ = FileDescriptor(out[0]);
  err_ = FileDescriptor(err[0]);
  if (pid_ < 0) throw std::runtime_error("fork failed");
  ::fcntl(out[0], F_SETFL, O_NONBLOCK);
  ::fcntl(err[0], F_SETFL, O_NONBLOCK);
}

/// The child between fork and exec: system calls only.
void Run::become(char* const* words, char* const* environment, int out, int err) const {
  ::setsid();
  if (plan_.terminal) ::ioctl(out, TIOCSCTTY, 0);
  ::dup2(plan_.terminal ? out : ::open("/dev/null", O_RDONLY), 0);
  ::dup2(out, 1);
  ::dup2(err, 2);
  ::close_range(3, ~0U, 0);
  if (plan_.run_folder_bytes > 0) {
    std::array<char, 64> size{};
    std::snprintf(size.data(), size.size(), "size=%lld", static_cast<long long>(plan_.run_folder_bytes));
    const std::string folder = path("run");
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("faultbox", folder.c_str(), "tmpfs", 0, size.data()) != 0)
      ::_exit(kNoFileSystem);
  }
  ::execve(words[0], words, environment);
  ::_exit(126);
}

pid_t Run::find_rank(int rank) const {
  for (const pid_t pid : processes())
    if (pid != pid_ && variable_of(pid, "RANK") == std::to_string(rank)) return pid;
  return 0;
}

void Run::read_from(FileDescriptor& fd, bool lines) {
  std::array<char, 64 << 10> piece;
  const ssize_t count = ::read(fd.get(), piece.data(), piece.size());
  if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) fd.reset();  // EIO: of a terminal nobody holds
  if (count <= 0) return;
  if (!lines) {
    printed_bytes_ += count;
    return;
  }
  unfinished_line_.append(piece.data(), static_cast<size_t>(count));
  for (size_t end; (end = unfinished_line_.find('\n')) != std::string::npos; unfinished_line_.erase(0, end + 1))
    if (lines_.size() < kMostLines) lines_.push_back({now_ns(), unfinished_line_.substr(0, end)});
}

void Run::take(int timeout_ms) {
  watch_ranks();
  std::vector<pollfd> polled = {pollfd{out_.get(), POLLIN, 0}, pollfd{err_.get(), POLLIN, 0}};
  for (const Watched& rank : watched_) polled.push_back({rank.fd.get(), POLLIN, 0});
  const int64_t before = now_ns();
  ::poll(polled.data(), polled.size(), timeout_ms);
  const int64_t now = now_ns();
  if (const int64_t late = now - before - int64_t{1'000'000} * timeout_ms; late > kPunctual) lag_ns_ += late;
  for (size_t rank = 0; rank < watched_.size(); ++rank)
    if (polled[2 + rank].revents != 0) {
      watched_[rank].ended_ns = now;
      watched_[rank].fd.reset();
    }
  look_for_starvation();
  if (polled[0].revents != 0) read_from(out_, false);
  if (polled[1].revents != 0) read_from(err_, true);
  if (sampled_) return;
  for (int rank = 0; rank < plan_.ranks; ++rank)
    sampled_ = sampled_ || page_->ranks[rank].place.load() >= Place::kForward;
  if (!sampled_) return;
  holdings_ = holdings_of(processes());
  // Ranks that are still meeting listen on a Unix socket without a name in the file system; none ever listens on a
  // port.
  for (const auto& socket : sockets_in_kernel(holdings_.sockets, false))
    if (!socket.starts_with("unix")) problems_.push_back("a socket listens: " + socket);
}

void Run::watch_ranks() {
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    Watched& watched = watched_[static_cast<size_t>(rank)];
    const pid_t pid = page_->ranks[rank].pid;
    if (pid == watched.pid || pid <= 0) continue;
    watched = {pid, FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))), 0};
  }
}

bool Run::reap() {
  if (ended()) return true;
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) != pid_) return false;
  ended_ns_ = now_ns();
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  const std::lock_guard lock(launchers_mutex);
  launchers.erase(pid_);
  return true;
}

void Run::look_for_starvation() {
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < plan_.ranks; ++rank)
    if (const pid_t pid = page_->ranks[rank].pid; pid != 0) ranks.push_back(pid);
  starvation_.look(pid_, ranks, now_ns());
}

bool Run::is_over(int64_t start_ns, milliseconds timeout) const {
  const int64_t over = now_ns() - start_ns - std::chrono::nanoseconds(timeout).count();
  return over >= 0 && over >= lag_ns(start_ns);
}

bool Run::wait_until(const std::function<bool()>& condition, milliseconds timeout) {
  for (const int64_t start = now_ns(); !condition();) {
    if (reap() || is_over(start, timeout)) return condition();  // it may have come true just before the end
    take(1);
  }
  return true;
}

void Run::wait_for(std::chrono::microseconds time) {
  const int64_t until = now_ns() + time.count() * 1000;
  wait_until([&] { return now_ns() >= until; }, milliseconds(1000) + std::chrono::ceil<milliseconds>(time));
}

bool Run::wait(milliseconds timeout) {
  bool in_time = true;
  for (const int64_t start = now_ns(); !reap();) {
    if (is_over(start, timeout)) {
      in_time = false;
      ::kill(pid_, SIGKILL);
      eventually([&] { return reap(); }, milliseconds(5000));
      break;
    }
    take(2);
  }
  // What is still in the pipes. A process that was left behind may hold them open.
  for (const Deadline deadline(milliseconds(200)); (out_ || err_) && !deadline.passed();) take(1);
  out_.reset();
  err_.reset();
  return in_time;
}

Report Run::report() const {
  const std::string json = read_file(path("run/report.json"));
  Report report = read_report(lines_, json, exit_code_);
  if (ended() && report.culprit && json.empty()) report.problems.emplace_back("there is no report.json");
  return report;
}

std::vector<std::string> Run::audit() {
  std::vector<std::string> problems = problems_;
  const milliseconds lag(lag_ns(ended_ns_ - std::chrono::nanoseconds(kGoneIn).count()) / 1'000'000);
  if (!eventually([&] { return processes().empty(); }, kGoneIn + lag))
    for (const pid_t left : processes()) {
      problems.push_back("a process is left: " + describe_process(left));
      ::kill(left, SIGKILL);
    }
  reap_orphans(running_launchers());
  for (const auto& name : holdings_.named_segments) problems.push_back("a named segment: " + name);
  std::vector<std::string> left;
  eventually([&] { return (left = sockets_in_kernel(holdings_.sockets, true)).empty(); }, kGoneIn + lag);
  for (const auto& socket : left) problems.push_back("a socket is left: " + socket);
  try {
    const CheckpointFolder checkpoints(path("run/checkpoints"));
    if (const auto list = checkpoints.list(); !list.empty()) checkpoints.check(list.front());
  } catch (const Error& error) {
    problems.push_back(std::string("the newest checkpoint does not load: ") + error.what());
  }
  return problems;
}

}  // namespace lockstep::faultbox
