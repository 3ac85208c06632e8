#include <lockstep/program.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <c10/util/Exception.h>

#include "base/environment.h"
#include "context/start_ranks.h"

namespace lockstep {
namespace {

/// Under `lockstep run` the launcher's block ends with the page, for all ranks.
void name_page(const char* condition) {
  if (!Environment::from_process().lockstep_page_fd) std::fprintf(stderr, "  page      docs/errors.md%s\n", condition);
}

}  // namespace

int run_program(int argc, char** argv, const std::function<int()>& body) {
  const std::string name = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "program";
  try {
    start_ranks_if_asked(argc, argv);
    return body();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what_without_backtrace());
    name_page(", if this is a message of Lockstep's");  // LibTorch's own are of the same class
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    name_page("");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
  }
  return 1;
}

}  // namespace lockstep
