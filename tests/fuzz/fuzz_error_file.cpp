// libFuzzer: any bytes as the file in which a rank says what ended it.

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "base/file_descriptor.h"
#include "rank_page/error_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const lockstep::FileDescriptor file(::memfd_create("error.json", MFD_CLOEXEC));
  if (::write(file.get(), data, size) < 0) return 0;
  lockstep::read_error_file("/proc/self/fd/" + std::to_string(file.get()));
  return 0;
}
