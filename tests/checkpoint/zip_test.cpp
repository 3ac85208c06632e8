#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "checkpoint/failure.h"
#include "checkpoint/format/zip_reader.h"
#include "checkpoint/format/zip_writer.h"

namespace lockstep {
namespace {

using testing::failure;

/// An archive whose payload is zeros: only the rest takes memory.
class SparseFile : public ByteSink, public ByteSource {
 public:
  SparseFile() : ByteSource("sparse.zip", 0) {}
  void write(const void* data, size_t size) override {
    const char* bytes = static_cast<const char*>(data);
    const bool zeros = size > 0 && bytes[0] == '\0' && std::memcmp(bytes, bytes + 1, size - 1) == 0;
    if (!zeros) pieces_[size_] = std::string(bytes, size);
    size_ += size;
  }

 private:
  void copy(uint64_t offset, char* to, uint64_t count) const override {
    std::memset(to, 0, count);
    for (const auto& [start, bytes] : pieces_)
      for (uint64_t i = 0; i < bytes.size(); ++i)
        if (start + i >= offset && start + i < offset + count) to[start + i - offset] = bytes[i];
  }
  std::map<uint64_t, std::string> pieces_;
};

TEST(Zip, EntriesOfMoreThanFourGibibytes) {
  constexpr uint64_t kLarge = (uint64_t{4} << 30) + 12345;
  SparseFile file;
  ZipWriter writer(file);
  writer.add("a/small", "first");
  writer.begin("a/large", kLarge);
  const std::string zeros(1 << 20, '\0');
  for (uint64_t done = 0; done < kLarge;) {
    const uint64_t count = std::min<uint64_t>(zeros.size(), kLarge - done);
    writer.append(zeros.data(), count);
    done += count;
  }
  writer.end();
  writer.add("a/behind", "last");
  writer.finish();
  const ZipReader reader(file);
  ASSERT_EQ(reader.entries().size(), 3u);
  EXPECT_EQ(reader.find("a/large")->bytes, kLarge);
  EXPECT_EQ(reader.read_text(*reader.find("a/small"), 100), "first");
  EXPECT_EQ(reader.read_text(*reader.find("a/behind"), 100), "last");
  for (const ZipEntry& entry : reader.entries()) EXPECT_EQ(entry.offset % 64, 0u) << entry.name;
  EXPECT_GT(reader.find("a/behind")->offset, kLarge);
  EXPECT_EQ(reader.find("a/nothing"), nullptr);
}

class Memory : public ByteSink {
 public:
  void write(const void* data, size_t size) override { bytes.append(static_cast<const char*>(data), size); }
  std::string bytes;
};

std::string archive() {
  Memory memory;
  ZipWriter writer(memory);
  writer.add("a/one", std::string(100, '1'));
  writer.add("a/two", std::string(100, '2'));
  writer.finish();
  return memory.bytes;
}

std::string refusal(const std::string& bytes) {
  return failure([&] {
    const MemorySource source("x.zip", bytes);
    const ZipReader reader(source);
    for (const ZipEntry& entry : reader.entries()) reader.read_text(entry, 1000);
  });
}

/// Writes a number into the `entry`-th record of the directory.
void patch(std::string& bytes, int entry, size_t at, uint32_t value) {
  size_t record = 0;
  for (int i = 0; i <= entry; ++i) record = bytes.find("PK\x01\x02", record + 1);
  std::memcpy(bytes.data() + record + at, &value, sizeof value);
}

TEST(Zip, RefusesWhatItShould) {
  EXPECT_EQ(refusal(archive()), "");
  const auto patched = [](size_t at, uint32_t value) {
    std::string bytes = archive();
    patch(bytes, 1, at, value);
    return refusal(bytes);
  };
  std::string same_place = archive();
  patch(same_place, 1, 42, 0);
  EXPECT_NE(refusal(same_place).find("`a/two` is not where"), std::string::npos);
  std::string overlap = archive();
  patch(overlap, 0, 20, 200);
  patch(overlap, 0, 24, 200);
  EXPECT_NE(refusal(overlap).find("`a/one` and `a/two` overlap"), std::string::npos) << refusal(overlap);
  EXPECT_NE(patched(16, 1).find("checksum is wrong"), std::string::npos);
  EXPECT_EQ(patched(16, 0), "");  // none was computed
  EXPECT_NE(patched(24, 1 << 30).find("compressed"), std::string::npos);
  EXPECT_NE(patched(42, 1 << 30).find("does not lie within"), std::string::npos);
  EXPECT_NE(patched(8, 1).find("encrypted"), std::string::npos);
  std::string twice = archive();
  for (size_t at = 0; (at = twice.find("a/two", at)) != std::string::npos;) twice.replace(at, 5, "a/one");
  EXPECT_NE(refusal(twice).find("`a/one` twice"), std::string::npos);
}

TEST(Zip, CutAnywhereItIsRefused) {
  const std::string whole = archive();
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(refusal(whole.substr(0, size)), "") << size << " of " << whole.size();
}

}  // namespace
}  // namespace lockstep
