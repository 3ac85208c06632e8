#include "launch/process/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "launch/launch_error.h"
#include "launch/process/numa.h"

namespace lockstep {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

/// The child between fork and exec: system calls only. Returns when something fails.
void become(const ProcessStart& start, const LauncherSettings& settings, char* const* arguments,
            char* const* environment, const cpu_set_t* cpus, pid_t launcher) {
  if (::setpgid(0, 0) != 0) return;
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != launcher) ::_exit(1);  // the launcher died before the previous line
  const pid_t self = ::getpid();
  if (::write(start.announce, &self, sizeof self) != sizeof self) {
    // The guard was killed, as this machine's other processes may be next. It is no fault of the program.
    if (errno == EPIPE) ::kill(self, SIGKILL);
    return;
  }
  if (::dup2(start.input, 0) < 0 || ::dup2(start.output, 1) < 0 || ::dup2(start.error, 2) < 0) return;
  for (const int fd : start.kept)
    if (::fcntl(fd, F_SETFD, 0) != 0) return;
  if (cpus != nullptr && ::sched_setaffinity(0, sizeof *cpus, cpus) != 0) return;
  if (start.memory_node >= 0) prefer_memory_of(start.memory_node);
  if (start.ignore_suspend) ::signal(SIGTSTP, SIG_IGN);
  settings.restore();
  ::execve(start.program.c_str(), arguments, environment);
}

}  // namespace

LauncherSettings::LauncherSettings() {
  sigset_t handled;
  sigemptyset(&handled);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCONT}) {
    // A signal that was ignored at the start (nohup) stays ignored; if blocked, it would still arrive.
    struct sigaction before {};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaddset(&handled, signal);
  }
  ::sigprocmask(SIG_BLOCK, &handled, &mask_);
  signal_fd_ = FileDescriptor(::signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd_) throw_limit("making a signal descriptor");
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &broken_pipe_);
  ::sigaction(SIGXFSZ, &ignore, &file_too_large_);
  // A process that ignores SIGCHLD, even by inheritance, does not learn how its children end.
  struct sigaction told {};
  told.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &told, &child_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::getrlimit(RLIMIT_NOFILE, &descriptors_);
  rlimit all = descriptors_;
  all.rlim_cur = all.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &all);
}

LauncherSettings::~LauncherSettings() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  restore();
}

int LauncherSettings::next_signal() const {
  signalfd_siginfo info;
  return ::read(signal_fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

void LauncherSettings::restore() const {
  ::sigaction(SIGPIPE, &broken_pipe_, nullptr);
  ::sigaction(SIGXFSZ, &file_too_large_, nullptr);
  ::sigaction(SIGCHLD, &child_, nullptr);
  ::setrlimit(RLIMIT_NOFILE, &descriptors_);
  ::sigprocmask(SIG_SETMASK, &mask_, nullptr);
}

Process::Process(const ProcessStart& start, const LauncherSettings& settings) {
  const auto arguments = pointers(start.arguments), environment = pointers(start.environment);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const int cpu : start.cpus) CPU_SET(cpu, &cpus);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw_limit("making a pipe");
  failure_ = FileDescriptor(ends[0]);
  const FileDescriptor report(ends[1]);
  const pid_t launcher = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw_limit("starting a process");
  if (pid_ == 0) {
    become(start, settings, arguments.data(), environment.data(), start.cpus.empty() ? nullptr : &cpus, launcher);
    const int code = errno;
    [[maybe_unused]] const ssize_t written = ::write(report.get(), &code, sizeof code);
    ::_exit(127);
  }
  ::setpgid(pid_, pid_);  // the child does so, too; either may be first
  pidfd_ = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (pidfd_) return;
  const int code = errno;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  errno = code;
  throw_limit("opening a process descriptor");
}

Process::~Process() {
  if (reaped_) return;
  signal_group(SIGKILL);
  // A process that survives even SIGKILL (a dead disk) is left to init rather than waited for.
  pollfd ended{.fd = pidfd_.get(), .events = POLLIN};
  ::poll(&ended, 1, 1000);
  ::waitpid(pid_, nullptr, WNOHANG);
}

std::optional<ProcessEnd> Process::end() {
  if (end_) return end_;
  siginfo_t info{};
  rusage usage{};
  // glibc's waitid does not return the usage.
  if (::syscall(SYS_waitid, P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT, &usage) != 0 || info.si_pid == 0)
    return std::nullopt;
  peak_bytes_ = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
  int code;
  if (::read(failure_.get(), &code, sizeof code) == sizeof code)
    end_ = {ProcessEnd::Kind::kNotStarted, code};
  else
    end_ = {info.si_code == CLD_EXITED ? ProcessEnd::Kind::kExited : ProcessEnd::Kind::kSignalled, info.si_status};
  return end_;
}

void Process::signal_group(int signal) const {
  if (!reaped_) ::kill(-pid_, signal);
}

bool Process::group_is_gone() {
  while (::waitpid(-pid_, nullptr, WNOHANG) > 0) reaped_ = true;
  return ::kill(-pid_, 0) != 0 && errno == ESRCH;
}

}  // namespace lockstep
