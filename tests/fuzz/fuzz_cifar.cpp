// libFuzzer: any bytes as CIFAR's archive. Chance would not find gzip's checksum, so the bytes are also taken for the
// tar inside and packed here; and for a file of records.

#include <zlib.h>

#include <lockstep/error.h>

#include "data/cifar_file.h"
#include "fuzz_file.h"

namespace {

std::string pack(const uint8_t* data, size_t size) {
  z_stream stream{};
  constexpr int kGzip = 16;
  deflateInit2(&stream, Z_NO_COMPRESSION, Z_DEFLATED, kGzip + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string packed(deflateBound(&stream, size) + 32, '\0');
  stream.next_in = const_cast<Bytef*>(data);
  stream.avail_in = static_cast<uInt>(size);
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const CifarLayout layout{.folder = "cifar-10-batches-bin",
                           .archive = "none",
                           .members = {"test_batch.bin"},
                           .classes = {10},
                           .greatest_records = 8,
                           .remedy = ""};
  const std::string packed = pack(data, size);
  const FuzzFile raw(data, size, ".tar.gz");
  const FuzzFile tar(reinterpret_cast<const uint8_t*>(packed.data()), packed.size(), ".tar.gz");
  for (const FuzzFile* file : {&raw, &tar}) {
    try {
      const CifarImages images = read_cifar(file->path(), layout);
      if (images.labels.empty() || images.pixels.size() != images.labels.size() * 3072) __builtin_trap();
    } catch (const Error&) {
    }
  }
  return 0;
}
