#include "hosts/workplace.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <utility>

#include "base/processor.h"
#include "hosts/addresses.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr const char* kOfAMachine[] = {"LOCKSTEP_MACHINE", "HOSTNAME",      "TMPDIR",     "XDG_RUNTIME_DIR",
                                       "SSH_CONNECTION",   "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_TTY"};

/// Changes to the plan's folder. Returns the environment of the ranks.
EnvironmentBlock enter(const Prepare& plan, const EnvironmentBlock& own) {
  std::error_code error;
  if (!plan.folder.empty()) std::filesystem::current_path(plan.folder, error);
  if (error)
    throw LaunchError(kExitNotStarted, "there is no folder " + plan.folder + " to run in (" + error.message() +
                                           "); it must exist at the same path on all machines");
  return plan.environment.empty() ? own : environment_here(plan.environment, own);
}

LaunchOptions options_of(const Prepare& plan) {
  LaunchOptions options;
  options.ranks = plan.slots;
  options.bind = static_cast<Binding>(std::clamp(plan.bind, 0, static_cast<int>(Binding::kNuma)));
  options.command = plan.command;
  options.max_restarts = plan.max_restarts;
  options.shown_ranks.clear();
  return options;
}

std::string address_of(const Prepare& plan, const std::string& interface, const std::string& local_address) {
  if (!interface.empty()) return address_on(interface);
  return plan.address.empty() ? local_address : plan.address;
}

}  // namespace

EnvironmentBlock environment_here(const EnvironmentBlock& coordinators, const EnvironmentBlock& own) {
  EnvironmentBlock here = coordinators;
  for (const std::string name : kOfAMachine) {
    const auto has_name = [&](const std::string& variable) { return variable.starts_with(name + "="); };
    std::erase_if(here, has_name);
    std::copy_if(own.begin(), own.end(), std::back_inserter(here), has_name);
  }
  return here;
}

Workplace::Workplace(const Prepare& plan, const EnvironmentBlock& own, const std::string& interface,
                     const std::string& local_address)
    : environment_(enter(plan, own)),
      options_(options_of(plan)),
      commands_(plan_ranks(options_, environment_)),
      folder_(plan.run_dir, plan.keep_run_dir, RunFolder::Use::kShared),
      address_(address_of(plan, interface, local_address)),
      port_(address_),
      run_id_(plan.run_id) {}

Ready Workplace::ready() const {
  return {.address = address_,
          .master_port = port_.number(),
          .program_hash = program_hash(commands_[0].program, options_.command),
          .processor = processor_name(),
          .warnings = plan_warnings(options_, environment_),
          .network = own_network()};
}

TeamSetup Workplace::setup(const Start& order, const LauncherSettings& settings, const Guard& guard, int memory_fd) {
  if (std::exchange(options_.ranks, order.slots) != order.slots) commands_ = plan_ranks(options_, environment_);
  return {.options = options_,
          .environment = environment_,
          .commands = commands_,
          .folder = folder_.path(),
          .settings = settings,
          .guard = guard,
          .display = display_,
          .input = input_,
          .memory_fd = memory_fd,
          .master_port = order.master_port,
          .run_id = run_id_};
}

namespace {

using Digest = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

bool add_file(const Digest& digest, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  std::array<char, 64 << 10> piece;
  while (file.read(piece.data(), piece.size()), file.gcount() > 0)
    EVP_DigestUpdate(digest.get(), piece.data(), static_cast<size_t>(file.gcount()));
  return true;
}

}  // namespace

std::string script_of(const std::vector<std::string>& command) {
  for (size_t i = 1; i < command.size(); ++i)
    if (command[i].ends_with(".py") || command[i].ends_with(".sh")) return command[i];
  return "";
}

std::string program_hash(const std::string& program, const std::vector<std::string>& command) {
  const Digest digest(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  if (!digest || EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr) != 1 || !add_file(digest, program)) return "";
  if (const std::string script = script_of(command); !script.empty()) add_file(digest, script);
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned int size = 0;
  EVP_DigestFinal_ex(digest.get(), bytes.data(), &size);
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned int i = 0; i < size; ++i) {
    text.push_back(kDigits[bytes[i] >> 4]);
    text.push_back(kDigits[bytes[i] & 15]);
  }
  return text;
}

}  // namespace lockstep::hosts
