#include <lockstep/program.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <c10/util/Exception.h>

#include "context/start_ranks.h"

namespace lockstep {

int run_program(int argc, char** argv, const std::function<int()>& body) {
  const std::string name = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "program";
  try {
    start_ranks_if_asked(argc, argv);
    return body();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
  }
  return 1;
}

}  // namespace lockstep
