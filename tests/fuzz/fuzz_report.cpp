// libFuzzer: any bytes as a rank's metrics or, behind a first byte 't', as its trace; then the page of it.

#include <lockstep/error.h>

#include <cstdlib>
#include <sstream>

#include "report/page.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  PageContent content;
  content.name = "fuzz";
  std::istringstream in(std::string(reinterpret_cast<const char*>(data), size));
  if (size > 0 && data[0] == 't') {
    in.get();
    std::istringstream run(R"({"type":"run","world_size":2})");
    read_metrics(run, 0, content.run);
    try {
      content.traces[0] = read_trace(in);
    } catch (const Error&) {
    }
  } else {
    read_metrics(in, 0, content.run);
  }
  const std::string page = draw_page(content);
  // Whatever a name holds, no tag comes of it but ours.
  if (page.find("<fuzzed") != std::string::npos) std::abort();
  return 0;
}
