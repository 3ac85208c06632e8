#include "collective_job.h"

#include <algorithm>
#include <sstream>

namespace lockstep::bench {

CollectiveJob::Verdict CollectiveJob::check(const Case& wanted) {
  Verdict verdict{Verdict::kRight, ""};
  for (const std::string& answer : ask("check " + wanted.text())) {
    if (answer == "ok") continue;
    if (answer.starts_with("no ")) return {Verdict::kNotOffered, answer.substr(3)};
    if (!answer.starts_with("wrong ")) fail("answered " + answer);
    verdict = {Verdict::kWrong, answer.substr(6)};
  }
  return verdict;
}

std::vector<double> CollectiveJob::time(const Case& wanted, size_t warm, size_t samples, size_t batch) {
  std::ostringstream command;
  command << "time " << wanted.text() << ' ' << warm << ' ' << samples << ' ' << batch;
  std::vector<double> slowest(samples, 0);
  for (const std::string& answer : ask(command.str())) {
    std::istringstream in(answer);
    std::string word;
    in >> word;
    for (double& sample : slowest) {
      double mine = 0;
      if (word != "times" || !(in >> mine)) fail("answered " + answer.substr(0, 200));
      sample = std::max(sample, mine);
    }
  }
  return slowest;
}

}  // namespace lockstep::bench
