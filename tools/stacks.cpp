#include "status_command.h"

#include <elf.h>
#include <signal.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/proc_file.h"
#include "capture.h"
#include "launch/launch_error.h"
#include "launch/process/process_table.h"

// A process is stopped while a program reads its stacks, and its parent does not learn of its death meanwhile. By
// itself, gdb reads the symbols of all libraries in that time, which takes many seconds for LibTorch's. So gdb is told
// of the libraries before it attaches. eu-stack stops one thread at a time.

namespace lockstep {
namespace {

constexpr std::chrono::seconds kStackTimeout(120);
constexpr uint64_t kPageBytes = 4096;
constexpr const char* kBegin = "=== the stacks begin";

bool has_program(const std::string& program) {
  return capture({program, "--version"}, std::chrono::seconds(5)).exit_code == 0;
}

/// The offset between a library's addresses in memory, mapped from its first byte at `start`, and those in its file;
/// empty: it is not a library.
std::optional<uint64_t> load_bias(const std::string& path, uint64_t start) {
  std::ifstream file(path, std::ios::binary);
  Elf64_Ehdr head{};
  if (!file.read(reinterpret_cast<char*>(&head), sizeof head)) return std::nullopt;
  if (std::string(reinterpret_cast<char*>(head.e_ident), SELFMAG) != ELFMAG) return std::nullopt;
  if (head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_phentsize != sizeof(Elf64_Phdr)) return std::nullopt;
  file.seekg(static_cast<std::streamoff>(head.e_phoff));
  Elf64_Phdr part{};
  for (int i = 0; i < head.e_phnum && file.read(reinterpret_cast<char*>(&part), sizeof part); ++i)
    if (part.p_type == PT_LOAD) return start - part.p_vaddr / kPageBytes * kPageBytes;
  return std::nullopt;
}

/// The places of a process's libraries, by path.
std::map<std::string, uint64_t> libraries_of(pid_t pid, const std::string& program) {
  std::map<std::string, uint64_t> found;
  std::istringstream maps(read_proc_file("/proc/" + std::to_string(pid) + "/maps"));
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string range, rights, offset, device, node, path;
    words >> range >> rights >> offset >> device >> node;
    std::getline(words >> std::ws, path);
    // gdb splits words at blanks and quotes.
    if (!path.starts_with('/') || path == program || path.find_first_of(" \"'\\") != std::string::npos) continue;
    if (offset.find_first_not_of('0') != std::string::npos || found.contains(path)) continue;
    if (const auto bias = load_bias(path, std::stoull(range, nullptr, 16))) found.emplace(path, *bias);
  }
  return found;
}

std::vector<std::string> gdb_command(pid_t pid) {
  std::error_code unknown;
  const std::string program = std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", unknown).string();
  std::vector<std::string> words = {"gdb", "-nx", "-batch", "-iex", "set auto-load no"};
  const auto add = [&](const std::string& command) { words.insert(words.end(), {"-ex", command}); };
  add("set auto-solib-add off");
  add("file /proc/" + std::to_string(pid) + "/exe");
  for (const auto& [path, bias] : libraries_of(pid, program))
    add("add-symbol-file " + path + " -o " + std::to_string(bias));
  add(std::string("echo ") + kBegin + "\\n");
  add("attach " + std::to_string(pid));
  add("thread apply all backtrace 40");
  add("detach");
  return words;
}

/// The command that prints the stacks of a running process without asking anything; empty if none.
std::vector<std::string> stack_printer(pid_t pid) {
  if (has_program("gdb")) return gdb_command(pid);
  if (has_program("eu-stack")) return {"eu-stack", "-n", "40", "-p", std::to_string(pid)};
  return {};
}

bool is_traced(pid_t pid) {
  const std::string tracer = value_in(read_proc_file("/proc/" + std::to_string(pid) + "/status"), "TracerPid", ':');
  return !tracer.empty() && tracer != "0";
}

bool has_ended(pid_t pid) {
  const char state = process_state(pid);
  return state == '\0' || state == 'Z' || state == 'X';
}

/// Reports that the process has ended, which the program that holds it would hide, or has been held for too long.
class Watch {
 public:
  explicit Watch(pid_t pid) : pid_(pid) {}

  std::string operator()() {
    if (has_ended(pid_)) return "the process has ended in the meantime";
    if (!is_traced(pid_)) {
      held_by_.reset();
    } else if (!held_by_) {
      held_by_.emplace(kLongestStop);
    } else if (held_by_->passed()) {
      return "the process was stopped for " + std::to_string(kLongestStop.count()) +
             " s, so it was released before all stacks were read";
    }
    return "";
  }

 private:
  const pid_t pid_;
  std::optional<Deadline> held_by_;
};

}  // namespace

bool print_stacks(pid_t pid) {
  const auto printer = stack_printer(pid);
  if (printer.empty())
    throw LaunchError(kExitNotStarted,
                      "neither gdb nor eu-stack is in PATH; install one (Debian: apt-get install gdb)");
  const bool stood = process_state(pid) == 'T';
  Watch watch(pid);
  Captured said = capture(printer, kStackTimeout, std::ref(watch));
  // A debugger killed right after attaching leaves its stop signal behind.
  if (!stood && process_state(pid) == 'T') ::kill(pid, SIGCONT);
  if (const size_t begin = said.out.find(kBegin); begin != std::string::npos)
    said.out.erase(0, said.out.find('\n', begin) + 1);
  const bool refused = (said.err + said.out).find("ot permitted") != std::string::npos;
  if (refused)
    std::cout << "the kernel does not permit reading its stacks: run this as its user with kernel.yama.ptrace_scope=0, "
                 "or as root; in a container, with CAP_SYS_PTRACE\n";
  else
    std::cout << said.out;
  if (!refused && said.exit_code != 0)
    std::cout << printer[0] << " failed: " << (said.failure.empty() ? said.err : said.failure) << "\n";
  std::cout.flush();
  return !refused && said.exit_code == 0;
}

}  // namespace lockstep
