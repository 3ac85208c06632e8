#include "doctor_command.h"

#include <filesystem>
#include <fstream>
#include <iostream>

#include "capture.h"
#include "diagnosis.h"
#include "launch/launch_error.h"
#include "launch/process/own_program.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kProbe = "lockstep-doctor-probe";
constexpr int kSomethingIsBroken = 1;

/// Next to the launcher in a build, in ../libexec in an installation. Empty if it does not exist.
std::string find_probe(const fs::path& launcher) {
  std::error_code ignored;
  for (const fs::path& folder : {launcher.parent_path(), launcher.parent_path().parent_path() / "libexec" / "lockstep"})
    if (fs::is_regular_file(folder / kProbe, ignored)) return (folder / kProbe).string();
  return "";
}

/// The probe's object, from two ranks. If there is none, `failure` has the reason.
Json run_probe(const std::string& launcher, const std::string& probe, const std::string& backend,
               std::string& failure) {
  std::vector<std::string> command = {launcher, "run", "-n", "2", "--run-dir", "", "--hang-timeout", "60", "--", probe};
  if (!backend.empty()) command.push_back(backend);
  std::error_code ignored;
  std::string folder = (fs::temp_directory_path(ignored) / "lockstep-doctor-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) return failure = "cannot make a folder " + folder, Json();
  command[5] = folder;
  const Captured said = capture(command, std::chrono::seconds(120));
  fs::remove_all(folder, ignored);
  Json found = Json::parse(said.out, nullptr, false);
  if (said.exit_code == 0 && found.is_object()) return found;
  failure = !said.failure.empty() ? said.failure : said.err.empty() ? "it printed '" + said.out + "'" : said.err;
  return Json();
}

/// The library that the dynamic loader names in a program's output; empty: none.
std::string missing_library(const std::string& said) {
  constexpr std::string_view kWords = "error while loading shared libraries: ";
  const size_t at = said.find(kWords);
  if (at == std::string::npos) return "";
  const size_t name = at + kWords.size();
  return said.substr(name, said.find(':', name) - name);
}

/// Writes the probe's findings, or the reason for their absence, into `facts`.
void ask_probe(const std::string& launcher, Json& facts) {
  const std::string probe = find_probe(launcher);
  if (probe.empty()) {
    facts["probe_missing"] = true;
    facts["probe_failure"] = std::string("the checks that need LibTorch were left out: ") + kProbe +
                             " is neither beside " + launcher + " nor in ../libexec/lockstep";
    facts["probe_advice"] =
        "this is not an error: packages leave it out, because it links one machine's LibTorch by its path. The doctor "
        "of a build folder has it (build/bin/lockstep doctor), and `cmake --install` installs it";
    return;
  }
  std::string failure;
  facts["probe"] = run_probe(launcher, probe, "", failure);
  if (facts["probe"].is_null()) {
    const std::string library = missing_library(failure);
    facts["probe_failure"] =
        "two ranks of " + probe + " do not work: " + (library.empty() ? failure : "they do not find " + library);
    facts["probe_advice"] = library.empty()
                                ? "run `" + launcher + " run -n 2 " + probe + "` and see what it prints"
                                : "if LibTorch was moved or removed since this was built, build and install Lockstep "
                                  "again; to try another one: LD_LIBRARY_PATH=<its lib folder> " +
                                      launcher + " doctor";
    return;
  }
  failure.clear();
  if (const Json gloo = run_probe(launcher, probe, "gloo", failure); gloo.is_null() || gloo["works"] != true)
    facts["gloo_failure"] = failure.empty() ? "its sums are wrong" : failure;
}

Json gather() {
  Json facts = {
      {"lockstep", LOCKSTEP_VERSION}, {"machine", machine_facts()}, {"probe", nullptr},  {"probe_missing", false},
      {"probe_failure", ""},          {"probe_advice", ""},         {"gloo_failure", ""}};
  ask_probe(own_program(), facts);
  return facts;
}

}  // namespace

DoctorCommand::DoctorCommand(CLI::App& app)
    : doctor_(app.add_subcommand("doctor",
                                 "Check this machine and this build, and print a block to paste into a bug report")) {
  hosts_.add_to(*doctor_);
  doctor_->add_flag("--json", json_, "Print one JSON object instead of the block");
  doctor_
      ->add_option(
          "--compare", other_,
          "What `lockstep doctor --json` printed on another machine: say which operators give other bits there")
      ->type_name("FILE")
      ->check(CLI::ExistingFile);
}

int DoctorCommand::run() const {
  if (hosts_.asked_for()) return hosts_.run(json_);
  Json facts = gather();
  auto findings = diagnose(facts);
  if (!other_.empty()) {
    std::ifstream file(other_);
    for (Finding& finding : compare_bits(facts, Json::parse(file, nullptr, false)))
      findings.push_back(std::move(finding));
  }
  bool broken = false;
  facts["findings"] = Json::array();
  for (const Finding& finding : findings) {
    broken = broken || finding.level == Finding::Level::kBroken;
    facts["findings"].push_back(
        {{"level", name_of(finding.level)}, {"what", finding.what}, {"advice", finding.advice}});
  }
  std::cout << (json_ ? facts.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                      : format_diagnosis(facts, findings));
  if (!std::cout.flush()) return kExitStorage;
  return broken ? kSomethingIsBroken : kExitOk;
}

}  // namespace lockstep
