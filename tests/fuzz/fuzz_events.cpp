// libFuzzer: any bytes as an event file, and as one event, which no checksum protects.

#include <lockstep/error.h>

#include <sstream>

#include "observe/events/event_reader.h"
#include "report/run_data.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    decode_event(bytes);
  } catch (const Error&) {
  }
  std::istringstream in(bytes);
  RunData run;
  read_events(in, "fuzz", run);
  return 0;
}
