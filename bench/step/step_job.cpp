#include "step_job.h"

#include <algorithm>
#include <sstream>

namespace lockstep::bench {

double StepJob::attach() { return largest("attach", "attached"); }

double StepJob::peak() { return largest("peak", "peak_mib"); }

double StepJob::largest(const std::string& command, const std::string& name) {
  double largest = 0;
  for (const std::string& answer : ask(command)) {
    std::istringstream in(answer);
    std::string word;
    double mine = 0;
    if (!(in >> word >> mine) || word != name) fail("answered " + answer.substr(0, 200));
    largest = std::max(largest, mine);
  }
  return largest;
}

StepJob::Check StepJob::check(size_t steps) {
  Check result;
  for (const std::string& answer : ask("check " + std::to_string(steps))) {
    std::istringstream in(answer);
    std::string word, hash;
    std::vector<double> losses(steps);
    in >> word;
    for (double& loss : losses) in >> loss;
    if (word != "losses" || !(in >> word >> hash)) fail("answered " + answer.substr(0, 200));
    result.losses.push_back(std::move(losses));
    result.weights.push_back(std::move(hash));
  }
  return result;
}

StepJob::Times StepJob::time(size_t warm, size_t steps) {
  Times times{.steps_ms = std::vector<double>(steps, 0), .cpu_ms = 0};
  const auto answers = ask("time " + std::to_string(warm) + ' ' + std::to_string(steps));
  for (const std::string& answer : answers) {
    std::istringstream in(answer);
    std::string word;
    in >> word;
    double mine = 0;
    for (double& mean : times.steps_ms) {
      if (word != "times" || !(in >> mine)) fail("answered " + answer.substr(0, 200));
      mean += mine / static_cast<double>(answers.size());
    }
    if (!(in >> word >> mine) || word != "cpu") fail("answered " + answer.substr(0, 200));
    times.cpu_ms += mine / static_cast<double>(answers.size());
  }
  return times;
}

}  // namespace lockstep::bench
