#include "doctor_hosts.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "capture.h"
#include "hosts/host_list.h"
#include "launch/launch_error.h"
#include "launch/process/own_program.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr size_t kMostMachines = 128;
constexpr int kLinksAreBroken = 1;
/// A link with less than this share of the median's rate is slow.
constexpr double kSlow = 0.5;
constexpr double kMostClockError_s = 0.5;

std::string rate_text(double bytes_per_s) {
  const double mbit = bytes_per_s * 8e-6;
  return mbit >= 1000 ? formatted("%.1f Gbit/s", mbit * 1e-3) : formatted("%.1f Mbit/s", mbit);
}

/// The slower direction's rate; 0: the link was not measured.
double rate_of(const Json& link) {
  return std::min(link.value("bytes_per_s_to_low", 0.0), link.value("bytes_per_s_to_high", 0.0));
}

std::string link_row(const std::string& name, const Json& link) {
  if (rate_of(link) == 0) return name + "  not measured\n";
  return name + formatted("  %10.3f ms", link.value("round_trip_s", 0.0) * 1e3) +
         formatted("  %14s", rate_text(link.value("bytes_per_s_to_high", 0.0)).c_str()) +
         formatted("  %14s", rate_text(link.value("bytes_per_s_to_low", 0.0)).c_str()) +
         formatted("  %+10.3f ms", link.value("clock_ahead_s", 0.0) * 1e3) + "\n";
}

std::string link_table(const Json& links, const std::vector<std::string>& names) {
  size_t width = 4;
  const auto name_of = [&](const Json& link) {
    return names.at(link.at("low").get<size_t>()) + " - " + names.at(link.at("high").get<size_t>());
  };
  for (const Json& link : links) width = std::max(width, name_of(link).size());
  std::string lines =
      "link" + std::string(width - 4, ' ') + "  there and back           there            back  second's clock\n";
  for (const Json& link : links) {
    std::string name = name_of(link);
    name.resize(width, ' ');
    lines += link_row(name, link);
  }
  return lines;
}

std::string hosts_text(const std::vector<hosts::Host>& machines) {
  std::string words;
  for (const hosts::Host& host : machines) {
    const bool bracketed = host.name.find(':') != std::string::npos;
    words += (words.empty() ? "" : ",") + (bracketed ? "[" + host.name + "]" : host.name) + ":1";
  }
  return words;
}

/// The first machine to which all others can connect; empty if there is none.
std::string relay_for(const Json& links, const std::vector<std::string>& names) {
  std::vector<bool> is_reached(names.size(), true);
  for (const Json& link : links) {
    if (link.contains("low_cannot_reach_high")) is_reached.at(link.at("high").get<size_t>()) = false;
    if (link.contains("high_cannot_reach_low")) is_reached.at(link.at("low").get<size_t>()) = false;
  }
  const auto found = std::find(is_reached.begin(), is_reached.end(), true);
  return found == is_reached.end() ? "" : names[static_cast<size_t>(found - is_reached.begin())];
}

}  // namespace

LinkFindings judge_links(const std::string& found, const std::vector<std::string>& names) {
  const Json links = Json::parse(found);
  LinkFindings findings;
  std::vector<double> rates;
  for (const Json& link : links)
    if (rate_of(link) > 0) rates.push_back(rate_of(link));
  std::sort(rates.begin(), rates.end());
  const std::string relay = relay_for(links, names);
  const std::string otherwise =
      relay.empty() ? "" : ", or run with --encrypt --relay " + relay + ", to which all others can connect";
  const double median = rates.empty() ? 0 : rates[rates.size() / 2];
  for (const Json& link : links) {
    const std::string low = names.at(link.at("low").get<size_t>()), high = names.at(link.at("high").get<size_t>());
    const auto cannot = [&](const std::string& from, const std::string& to, const char* field) {
      if (link.contains(field))
        findings.broken.push_back(from + " cannot connect to " + to + ": " + printable(link[field].get<std::string>()) +
                                  "; allow TCP connections between them in their firewalls, on all ports" + otherwise);
    };
    cannot(low, high, "low_cannot_reach_high");
    cannot(high, low, "high_cannot_reach_low");
    if (link.contains("broke"))
      findings.broken.push_back(low + " and " + high + " connect, but the link broke while it was measured: " +
                                printable(link["broke"].get<std::string>()));
    if (rate_of(link) > 0 && rate_of(link) < kSlow * median)
      findings.slow.push_back(low + " and " + high + " have a slow link: " + rate_text(rate_of(link)) +
                              ", where the median of all links is " + rate_text(median));
    if (const double ahead = link.value("clock_ahead_s", 0.0); std::abs(ahead) > kMostClockError_s)
      findings.slow.push_back(
          (ahead > 0 ? high : low) + formatted(" has a clock that is %.1f s ahead of ", std::abs(ahead)) +
          (ahead > 0 ? low : high) + "'s, so times in their logs do not match; synchronise both by NTP");
  }
  return findings;
}

void DoctorHosts::add_to(CLI::App& doctor) {
  doctor.add_option("--hosts", hosts_, "Reach these machines instead, and measure the links between them")
      ->type_name("NODE1,NODE2");
  doctor.add_option("--hostfile", hostfile_, "The same from a file, as for lockstep run");
  doctor.add_option("--launch-command", launch_command_, "As for lockstep run");
  doctor.add_option("--interface", interface_, "As for lockstep run")->type_name("NAME");
}

int DoctorHosts::run(bool json) const {
  const auto machines = hosts_ ? hosts::parse_hosts(*hosts_, 1) : hosts::read_hostfile(*hostfile_, 1);
  if (machines.size() < 2 || machines.size() > kMostMachines)
    throw LaunchError(kExitBadCommandLine, "lockstep doctor takes 2 to " + std::to_string(kMostMachines) +
                                               " machines, because it measures links");
  std::vector<std::string> names;
  for (const hosts::Host& host : machines) names.push_back(printable(host.name));
  std::error_code ignored;
  std::string folder = (fs::temp_directory_path(ignored) / "lockstep-doctor-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) throw LaunchError(kExitStorage, "cannot make a folder " + folder);
  const std::string launcher = own_program();
  std::vector<std::string> command = {launcher, "run", "--hosts", hosts_text(machines), "--run-dir", folder};
  if (launch_command_) command.insert(command.end(), {"--launch-command", *launch_command_});
  if (interface_) command.insert(command.end(), {"--interface", *interface_});
  command.insert(command.end(), {"--", launcher, "agent", "--probe-links"});
  const Captured said = capture(command, std::chrono::seconds(90 + 8 * machines.size()));
  fs::remove_all(folder, ignored);
  const Json links = Json::parse(said.out, nullptr, false);
  if (said.exit_code != 0 || !links.is_array()) {
    std::cerr << said.err << said.failure << "\n";
    return kLinksAreBroken;
  }
  const LinkFindings findings = judge_links(said.out, names);
  if (json) {
    std::cout << Json{{"machines", names}, {"links", links}, {"broken", findings.broken}, {"slow", findings.slow}}.dump(
                     2)
              << "\n";
  } else {
    std::cout << link_table(links, names);
    for (const std::string& finding : findings.broken) std::cout << "BROKEN  " << finding << "\n";
    for (const std::string& finding : findings.slow) std::cout << "note    " << finding << "\n";
    if (findings.broken.empty()) std::cout << "all " << names.size() << " machines reach each other\n";
  }
  if (!std::cout.flush()) return kExitStorage;
  return findings.broken.empty() ? kExitOk : kLinksAreBroken;
}

}  // namespace lockstep
