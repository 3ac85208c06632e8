#include "workers/job.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace lockstep::bench {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kStart = 120s;   ///< until all ranks have reported
constexpr auto kAnswer = 120s;  ///< until an answer to one command
constexpr auto kLeave = 5s;     ///< until the launcher is gone after `quit`

int listen_on(const std::string& path, int ranks) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) throw JobError("socket path too long: " + path);
  std::strcpy(address.sun_path, path.c_str());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(fd, ranks) != 0)
    throw JobError("cannot listen on " + path + ": " + std::strerror(errno));
  return fd;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

/// This process's environment without what a launcher around it has set, and with `more`.
std::vector<std::string> child_environment(const std::vector<std::string>& more) {
  std::vector<std::string> result = more;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    const bool foreign = std::ranges::any_of(
        std::initializer_list<std::string_view>{"OMPI_", "PMI", "I_MPI_", "SLURM_", "LOCKSTEP_", "RANK=", "WORLD_SIZE=",
                                                "LOCAL_RANK=", "LOCAL_WORLD_SIZE=", "MASTER_", "LD_LIBRARY_PATH="},
        [&](std::string_view prefix) { return text.starts_with(prefix); });
    if (!foreign) result.push_back(text);
  }
  return result;
}

bool gone_within(int pid, std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (true) {
    const int reaped = waitpid(pid, nullptr, WNOHANG);
    if (reaped == pid || (reaped < 0 && errno == ECHILD)) return true;
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(10ms);
  }
}

}  // namespace

Job::Job(const System& system, int ranks, const std::string& folder)
    : name_(system.name), output_path_(folder + "/output") {
  if (!system.missing.empty()) throw JobError(system.missing);
  const std::string path = folder + "/socket";
  const int listener = listen_on(path, ranks);
  try {
    start(system, path);
    accept_ranks(listener, ranks);
  } catch (...) {
    close(listener);
    end();
    throw;
  }
  close(listener);
}

Job::~Job() { end(); }

void Job::start(const System& system, const std::string& socket) {
  std::vector<std::string> command = system.command;
  command.insert(command.end(), {"--socket", socket});
  const std::vector<std::string> environment = child_environment(system.environment);
  const auto argv = pointers(command);
  const auto envp = pointers(environment);
  const std::string folder = socket.substr(0, socket.rfind('/'));
  const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int output = open(output_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  pid_ = fork();
  if (pid_ == 0) {
    setsid();
    dup2(input, 0), dup2(output, 1), dup2(output, 2);
    if (chdir(folder.c_str()) == 0) execve(argv[0], argv.data(), envp.data());
    dprintf(2, "cannot start %s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  close(input), close(output);
  if (pid_ < 0) throw JobError(std::string("cannot fork: ") + std::strerror(errno));
}

void Job::accept_ranks(int listener, int ranks) {
  const auto deadline = Clock::now() + kStart;
  std::map<int, LineChannel> by_rank;
  while (by_rank.size() < static_cast<size_t>(ranks)) {
    pollfd ready{listener, POLLIN, 0};
    if (poll(&ready, 1, 100) <= 0) {
      siginfo_t ended{};
      waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT);
      if (ended.si_pid == pid_) fail("ended before all ranks had reported");
      if (Clock::now() > deadline)
        fail(std::to_string(by_rank.size()) + " of " + std::to_string(ranks) + " ranks have reported after 120 s");
      continue;
    }
    LineChannel channel(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    std::istringstream hello(channel.receive(kStart).value_or(""));
    std::string word;
    int rank = -1;
    hello >> word >> rank >> std::ws;
    std::getline(hello, version_);
    if (word != "hello" || rank < 0 || rank >= ranks || !by_rank.emplace(rank, std::move(channel)).second)
      fail("its ranks are not 0 to " + std::to_string(ranks - 1) + ", each once");
  }
  for (auto& [rank, channel] : by_rank) channels_.push_back(std::move(channel));
}

std::vector<std::string> Job::ask(const std::string& command) {
  for (LineChannel& channel : channels_)
    if (!channel.send(command)) fail("a rank is gone before `" + command + "`");
  const auto deadline = Clock::now() + kAnswer;
  std::vector<std::string> answers;
  for (LineChannel& channel : channels_) {
    const auto left = std::max(0ms, std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()));
    auto answer = channel.receive(left);
    if (!answer) {
      const char* what = Clock::now() < deadline ? " ended during `" : " has not answered within 120 s `";
      fail("rank " + std::to_string(answers.size()) + what + command + "`");
    }
    answers.push_back(std::move(*answer));
  }
  return answers;
}

void Job::fail(const std::string& what) const {
  std::this_thread::sleep_for(300ms);  // the launcher may still be telling why
  std::ifstream file(output_path_);
  std::ostringstream text;
  text << file.rdbuf();
  std::string said = text.str();
  if (said.size() > 2000) said = "..." + said.substr(said.size() - 2000);
  throw JobError(what + (said.empty() ? "" : "; it said: " + said));
}

void Job::end() {
  if (pid_ <= 0) return;
  std::vector<int> workers;
  for (LineChannel& channel : channels_) {
    workers.push_back(channel.peer_pid());
    channel.send("quit");
  }
  if (channels_.empty() || !gone_within(pid_, kLeave)) {
    kill(-pid_, SIGTERM);  // launchers pass it on
    if (!gone_within(pid_, kLeave)) {
      for (const int worker : workers)
        if (worker > 0) kill(worker, SIGKILL);
      kill(-pid_, SIGKILL);
      gone_within(pid_, kLeave);
    }
  }
  channels_.clear();  // a rank that is left notices that we are gone
  pid_ = -1;
}

}  // namespace lockstep::bench
