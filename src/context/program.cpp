#include <lockstep/program.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <c10/util/Exception.h>

#include "collectives/group_state.h"
#include "context/process_role.h"
#include "launch/error_page.h"

namespace lockstep {
namespace {

int print_error(const std::string& program, const char* text) {
  std::fprintf(stderr, "%s: %s\n%s", program.c_str(), text, page_line_of_exception(text).c_str());
  return 1;
}

}  // namespace

int run_program(int argc, const char* const* argv, const std::function<int()>& body) {
  const std::string name = argc > 0 ? std::filesystem::path(argv[0]).filename().string() : "program";
  try {
    start_ranks_if_asked(argc, argv);
    const int code = body();
    return code == 0 && has_unfinished_operations() ? 1 : code;
  } catch (const c10::Error& error) {
    return print_error(name, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return print_error(name, error.what());
  }
}

}  // namespace lockstep
