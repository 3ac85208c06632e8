#include "launch/diagnosis/failure_report.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/rank_names.h"
#include "base/shell_word.h"
#include "base/text.h"
#include "launch/error_page.h"
#include "launch/launch_error.h"
#include "launch/run_text.h"

namespace lockstep {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string short_seconds(double elapsed) { return formatted("%.*f", elapsed < 10 ? 2 : 1, elapsed); }

std::string mebibytes(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

const RankStatus* account_of(const FailureReport& report) {
  if (!report.verdict.culprit) return nullptr;
  const auto rank = static_cast<size_t>(report.verdict.culprit->rank);
  return rank < report.accounts.size() ? &report.accounts[rank] : nullptr;
}

bool uses_pages(const FailureReport& report) {
  return std::any_of(report.accounts.begin(), report.accounts.end(), [](const RankStatus& account) {
    return account.phase != RankStatus::Phase::kUnknown || account.pid > 0;
  });
}

std::string memory_text(const FailureReport& report) {
  const MemoryKills& memory = report.verdict.culprit->memory;
  std::string text = "killed for memory: " + memory.counted_in + " counts " + std::to_string(memory.count) +
                     (memory.count == 1 ? " such kill" : " such kills") + " since the start";
  text += memory.limit_bytes ? "; the limit is " + mebibytes(*memory.limit_bytes) : "; no limit is set there";
  return text + "; this rank had at most " + mebibytes(report.verdict.culprit->peak_bytes) + " in memory";
}

constexpr const char* kNoPages = "unknown: the program has no lockstep::Context to tell the launcher";

std::string kept_text(const FailureReport& report) {
  const std::string known = describe(report.left, report.goes_on);
  if (!known.empty()) return known;
  return uses_pages(report) ? "no checkpoint that the launcher knows of" : kNoPages;
}

std::string last_text(const RankStatus& account) {
  if (account.operation.kind.empty()) return "no collective yet";
  return printable(account.operation.text()) + (account.operation.running ? ", not finished" : ", finished");
}

class Block {
 public:
  void line(const char* what, const std::string& value) {
    text += "  " + std::string(what) + std::string(10 - std::strlen(what), ' ') + value + "\n";
  }
  std::string text;
};

void add_culprit(Block& block, const FailureReport& report) {
  const Verdict& verdict = report.verdict;
  const RankEnd& culprit = *verdict.culprit;
  block.text = "lockstep: rank " + std::to_string(culprit.rank) + " of " + std::to_string(report.world_size) + " " +
               verdict.headline + "\n";
  const bool said = report.what == verdict.testimony ||
                    (account_of(report) != nullptr && ended_by_exception(culprit, *account_of(report)));
  if (!report.what.empty() && !said) block.line("what", printable_line(report.what));
  if (verdict.exit_code == kExitOutOfMemory) block.line("memory", memory_text(report));
  block.line("process", std::to_string(culprit.pid) + " on " + report.host + ", " + short_seconds(culprit.seconds) +
                            " s after its start");
  block.line("program", report.program);
  if (verdict.witness)
    block.line("known by",
               "rank " + std::to_string(*verdict.witness) + ", which says: " + printable_line(verdict.testimony));
  const RankStatus* account = account_of(report);
  block.line("last did", account != nullptr && uses_pages(report) ? last_text(*account) : kNoPages);
  for (size_t i = 0; i < report.stall.size(); ++i) block.line(i == 0 ? "ranks" : "", printable(report.stall[i]));
  if (!report.advice.empty()) block.line("advice", report.advice);
  if (!verdict.also_suspect.empty())
    block.line("unsure", "rank " + list_ranks(verdict.also_suspect) +
                             " failed at the same time; which rank failed first is not known");
}

void add_tail(Block& block, const FailureReport& report) {
  if (report.tail.empty()) return block.line("output", "none");
  block.line("log", report.log_path.empty() ? "could not be written" : report.log_path);
  block.text +=
      "  its last " + (report.tail.size() == 1 ? "line" : std::to_string(report.tail.size()) + " lines") + ":\n";
  for (const auto& tail_line : report.tail) block.text += "  | " + tail_line + "\n";
}

OrderedJson operation_json(const RankStatus& account) {
  const auto& operation = account.operation;
  if (operation.kind.empty()) return nullptr;
  return {{"sequence", operation.sequence}, {"name", operation.kind},        {"of", operation.of},
          {"group", operation.group},       {"dtype", operation.dtype},      {"shape", operation.shape},
          {"elements", operation.elements}, {"finished", !operation.running}};
}

const char* kind_name(ProcessEnd::Kind kind) {
  return kind == ProcessEnd::Kind::kExited      ? "exited"
         : kind == ProcessEnd::Kind::kSignalled ? "signalled"
         : kind == ProcessEnd::Kind::kLost      ? "lost"
                                                : "not started";
}

OrderedJson culprit_json(const FailureReport& report) {
  const Verdict& verdict = report.verdict;
  if (!verdict.culprit) return nullptr;
  const RankEnd& culprit = *verdict.culprit;
  OrderedJson json = {
      {"rank", culprit.rank}, {"host", report.host}, {"pid", culprit.pid}, {"headline", verdict.headline}};
  json["what"] = report.what.empty() ? OrderedJson(nullptr) : OrderedJson(report.what);
  json["end"] = culprit.ended
                    ? OrderedJson{{"kind", kind_name(culprit.how.kind)},
                                  {"value", culprit.how.value},
                                  {"text", culprit.lost.empty() ? describe(culprit.how) : describe(culprit, {})},
                                  {"asked_to_stop", culprit.stopped},
                                  {"seconds", culprit.seconds}}
                    : OrderedJson(nullptr);
  json["peak_bytes"] = culprit.peak_bytes;
  const RankStatus* account = account_of(report);
  json["last_collective"] = account != nullptr ? operation_json(*account) : nullptr;
  return json;
}

OrderedJson state_json(const FailureReport& report) {
  const StateLeft& left = report.left;
  OrderedJson json = nullptr;
  if (!left.path.empty())
    json = {{"checkpoint", left.path}, {"step", left.step}, {"written_from_memory", left.written}};
  if (report.goes_on && left.in_memory >= 0) json["memory_step"] = left.in_memory;
  if (report.goes_on && left.suspect) json["problem"] = "saved before the divergence was found";
  if (!report.goes_on && !left.problem.empty()) json["problem"] = left.problem;
  return json;
}

OrderedJson how_known(const FailureReport& report) {
  const Verdict& verdict = report.verdict;
  if (!verdict.culprit) return nullptr;
  if (!report.stall.empty()) return {{"by", "no progress"}, {"ranks", report.stall}};
  if (verdict.witness) return {{"by", "another rank"}, {"rank", *verdict.witness}, {"says", verdict.testimony}};
  return {{"by", "the order of ends"}};
}

}  // namespace

std::string describe(const StateLeft& left, bool goes_on) {
  const std::string in_memory = "step " + std::to_string(left.in_memory);
  std::string on_disk = "step " + std::to_string(left.step) + " in " + printable(left.path);
  if (left.written) on_disk += ", written from the launcher's memory now";
  if (left.path.empty()) on_disk.clear();
  if (goes_on && left.in_memory >= 0)
    return in_memory + " in the launcher's memory" +
           (left.suspect ? " (saved before the divergence was found; it may have diverged, too)" : "") +
           (on_disk.empty() ? "" : ", " + on_disk);
  const std::string but = left.problem.empty() ? "" : " (" + printable(left.problem) + ")";
  if (left.in_memory >= 0 && (left.path.empty() || left.in_memory > left.step))
    return (on_disk.empty() ? "no checkpoint on disk" : on_disk) + "; " + in_memory +
           " was in the launcher's memory and could not be written" + but;
  return on_disk.empty() ? "" : on_disk + but;
}

std::string advice_on_hang(const FailureReport& report, const std::optional<Stall>& hang,
                           const LaunchOptions& options) {
  using Kind = Stall::Kind;
  const Verdict& verdict = report.verdict;
  if (verdict.exit_code != kExitHang || !verdict.culprit) return "";
  if (hang && hang->kind == Kind::kGroupOrder) return "use the groups in the same order on every rank";
  if (hang && (hang->kind == Kind::kStopped || hang->kind == Kind::kAllWait)) return "";
  std::chrono::milliseconds timeout(0);
  bool python = false;
  for (const auto& account : report.accounts) {
    timeout = std::max(timeout, account.collective_timeout);
    python = python || account.phase == RankStatus::Phase::kCommunicates;
  }
  const auto in_brackets = [](std::chrono::milliseconds time) {
    std::string text = short_seconds(static_cast<double>(time.count()) / 1000);
    return text.insert(0, " (").append(" s)");
  };
  const std::string collective =
      python ? "the timeout of init_process_group"
             : "ContextOptions::collective_timeout" + (timeout.count() > 0 ? in_brackets(timeout) : std::string());
  const bool known = hang || verdict.witness;
  const std::string who = known ? "rank " + std::to_string(verdict.culprit->rank) : std::string("a rank");
  const std::string begin = "if " + who + " works this long on purpose, ";
  if (!hang || hang->kind == Kind::kComputes) return begin + "raise " + collective;
  const std::string option = options.in_process ? "SpawnOptions::hang_timeout" : "--hang-timeout";
  return begin + "let it call lockstep::heartbeat() regularly, or raise " + option + in_brackets(options.hang_timeout) +
         "; the others wait for at most " + collective;
}

std::string format(const FailureReport& report) {
  Block block;
  if (report.verdict.culprit)
    add_culprit(block, report);
  else
    block.text = "lockstep: ended by " + report.stop_signal + "\n";
  if (!report.killed.empty())
    block.line("killed", "rank " + list_ranks(report.killed) + ", which did not stop when asked to");
  if (const std::string starts = earlier_starts(report.restarts, report.resizes); !starts.empty())
    block.line("restarts", starts + " before this");
  if (!report.no_restart.empty()) block.line("ends", "no restart: " + printable(report.no_restart));
  block.line("kept", kept_text(report));
  if (!report.command.empty())
    block.line("next", report.command + (report.left.path.empty() ? "" : "   (resumes, if the program does)"));
  if (!report.report_path.empty()) block.line("report", report.report_path);
  if (report.verdict.culprit) block.text += page_line(report.exit_code);
  if (report.verdict.culprit) add_tail(block, report);
  return block.text;
}

std::string to_json(const FailureReport& report) {
  const Verdict& verdict = report.verdict;
  OrderedJson json = {{"version", 1}, {"exit_code", report.exit_code}, {"world_size", report.world_size}};
  json["culprit"] = culprit_json(report);
  json["how_known"] = how_known(report);
  json["also_suspect"] = verdict.also_suspect;
  json["stop_signal"] = report.stop_signal.empty() ? OrderedJson(nullptr) : OrderedJson(report.stop_signal);
  json["program"] = report.program;
  json["state_kept"] = state_json(report);
  json["next_command"] = report.command;
  json["advice"] = report.advice.empty() ? OrderedJson(nullptr) : OrderedJson(report.advice);
  json["restarts"] = report.restarts;
  json["resizes"] = report.resizes;
  json["no_restart"] = report.no_restart.empty() ? OrderedJson(nullptr) : OrderedJson(report.no_restart);
  json["killed"] = report.killed;
  if (verdict.exit_code == kExitOutOfMemory) {
    const MemoryKills& memory = verdict.culprit->memory;
    json["memory"] = {{"kills", memory.count}, {"counted_in", memory.counted_in}};
    json["memory"]["limit_bytes"] = memory.limit_bytes ? OrderedJson(*memory.limit_bytes) : OrderedJson(nullptr);
  }
  json["log"] = report.log_path.empty() ? OrderedJson(nullptr) : OrderedJson(report.log_path);
  json["last_lines"] = report.tail;
  json["ranks"] = OrderedJson::array();
  for (size_t rank = 0; rank < report.accounts.size(); ++rank)
    json["ranks"].push_back({{"rank", rank},
                             {"steps", report.accounts[rank].steps},
                             {"heartbeats", report.accounts[rank].heartbeats},
                             {"last_collective", operation_json(report.accounts[rank])}});
  return json.dump(2, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace) + "\n";
}

RunFailure for_program(const FailureReport& report) {
  const auto& culprit = report.verdict.culprit;
  std::string what = report.what;
  // A rank that did not fail by itself is missed by others, or hung and was ended by the launcher.
  const bool by_itself = culprit && culprit->how.failed() && !culprit->stopped;
  if (what.empty() && culprit) what = by_itself ? describe(culprit->how) : report.verdict.headline;
  for (const auto& line : report.stall) what.append("\n").append(line);
  if (!report.advice.empty()) what.append("\n").append(report.advice);
  return {report.exit_code, culprit ? culprit->rank : -1, what};
}

std::string pasted_word(const std::string& word) {
  if (printable(word) == word) return shell_word(word);
  std::string quoted = "$'";
  for (const char letter : word) {
    std::array<char, 8> code{};
    std::snprintf(code.data(), code.size(), "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(letter)));
    const bool plain = letter >= ' ' && letter < 0x7f;
    if (letter == '\n')
      quoted += "\\n";
    else if (letter == '\'' || letter == '\\')
      quoted.append("\\").push_back(letter);
    else
      plain ? quoted.push_back(letter) : static_cast<void>(quoted.append(code.data()));
  }
  return quoted + "'";
}

std::string own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string line, word;
  while (std::getline(file, word, '\0')) {
    if (!line.empty()) line += ' ';
    line += pasted_word(word);
  }
  return line;
}

}  // namespace lockstep
