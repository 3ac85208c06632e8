#pragma once

#include <map>
#include <string>
#include <vector>

#include "report/run_data.h"
#include "report/step_picture.h"

namespace lockstep {

/// A file of the run that the page links to.
struct LinkedFile {
  std::string path;  ///< relative to the page's folder
  std::string what;
};

struct PageContent {
  std::string name;    ///< of the run
  std::string folder;  ///< as the user named it
  RunData run;
  std::map<int, TraceOfRank> traces;
  std::vector<LinkedFile> files;
};

/// A self-contained HTML page: it needs no network and no script or style but its own.
std::string draw_page(const PageContent& content);

}  // namespace lockstep
