#include "launch/error_page.h"

#include <iostream>

#include "launch/diagnosis/verdict.h"
#include "rank_page/rank_board.h"

namespace lockstep {

std::string page_line(int exit_code) { return "  explain   lockstep explain " + std::to_string(exit_code) + "\n"; }

int print_launcher_error(const std::exception& error, int exit_code, const std::string& more) {
  std::cerr << "lockstep: " << error.what() << "\n" << more << page_line(exit_code);
  return exit_code;
}

std::string page_line_of_exception(std::string_view text) {
  if (launchers_board() != nullptr) return "";
  // No other process reads this page, so this one judges itself as the launcher would.
  RankPage& page = own_page();
  page.fail_by_exception(text, false);
  const RankEnd failed{.how = {ProcessEnd::Kind::kExited, 1}};
  return page_line(judge({.ends = {failed}, .ranks = {{.account = page.read(1).at_end()}}}).exit_code);
}

}  // namespace lockstep
