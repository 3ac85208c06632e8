#include "checkpoint/sliced_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/file_descriptor.h"

namespace lockstep {
namespace {

struct SlicedMemory {
  Slices slices;
  void* address;

  size_t size() const { return std::max<size_t>(slices.bytes * static_cast<size_t>(slices.ranks), 1); }
  ~SlicedMemory() { ::munmap(address, size()); }
};
void delete_sliced_memory(void* memory) { delete static_cast<SlicedMemory*>(memory); }
void delete_partial_memory(void* memory) { delete_sliced_memory(memory); }

/// `deleter`: by which the memory is known.
at::Tensor lazy_zeros(const Slices& slices, int64_t elements, at::ScalarType dtype, c10::DeleterFnPtr deleter) {
  auto sliced = std::make_unique<SlicedMemory>(SlicedMemory{slices, nullptr});
  void* memory =
      ::mmap(nullptr, sliced->size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no address space for ", sliced->size(),
              " bytes of which each rank holds a slice: ", std::strerror(errno));
  sliced->address = memory;
  at::DataPtr data(memory, sliced.release(), deleter, at::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                       slices.bytes * static_cast<size_t>(slices.ranks),
                                                       std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::dtype(dtype)).set_(at::Storage(std::move(storage)), 0, {elements * slices.ranks}, {1});
}

void forget_pages(std::byte* memory, size_t begin, size_t end) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t first = (begin + page - 1) / page * page, last = end / page * page;
  if (first >= last) return;
  // The memory begins with a page. If the kernel refuses, it keeps the pages, which are never read.
  ::madvise(memory + first, last - first, MADV_DONTNEED);
}

/// A new file without a name.
FileDescriptor nameless_file(const std::string& folder) {
  FileDescriptor file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  std::string name = folder + "/.lockstep-state-XXXXXX";
  file = FileDescriptor(::mkostemp(name.data(), O_CLOEXEC));
  if (file) ::unlink(name.c_str());
  return file;
}

[[noreturn]] void refuse_folder(const std::string& folder, const std::string& why) {
  throw StorageError("cannot keep an optimizer's state in the folder " + folder + ": " + why);
}

/// As nameless_file(). Throws StorageError if there can be none on a disk.
FileDescriptor state_file(const std::string& folder) {
  FileDescriptor file = nameless_file(folder);
  struct statfs system;
  if (!file || ::fstatfs(file.get(), &system) != 0) refuse_folder(folder, std::strerror(errno));
  if (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)
    refuse_folder(folder, "it is in memory (tmpfs); name a folder on a disk, or leave state_folder empty");
  return file;
}

/// Puts a file in `folder` in the place of the pages with [begin, end) of the memory.
void map_file(std::byte* memory, size_t begin, size_t end, const std::string& folder) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t first = begin / page * page, bytes = (end + page - 1) / page * page - first;
  if (bytes == 0) return;
  const FileDescriptor file = state_file(folder);
  if (const int problem = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)); problem != 0)
    refuse_folder(folder, "no room for " + std::to_string((bytes + (size_t{1} << 20) - 1) >> 20) +
                              " MiB: " + std::strerror(problem));
  if (::mmap(memory + first, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED)
    refuse_folder(folder, std::strerror(errno));
}

}  // namespace

void check_state_folder(const std::string& folder) {
  if (!folder.empty()) state_file(folder);
}

at::Tensor sliced_zeros(int64_t elements, at::ScalarType dtype, int ranks, int place, std::vector<int> holders,
                        const std::string& folder) {
  const Slices slices{ranks, place, static_cast<size_t>(elements) * c10::elementSize(dtype), std::move(holders)};
  at::Tensor zeros = lazy_zeros(slices, elements, dtype, delete_sliced_memory);
  if (!folder.empty())
    map_file(static_cast<std::byte*>(zeros.storage().mutable_data()), slices.begin(), slices.begin() + slices.bytes,
             folder);
  return zeros;
}

at::Tensor partial_zeros(int64_t bytes) {
  return lazy_zeros({.ranks = 1, .place = 0, .bytes = static_cast<size_t>(bytes)}, bytes, at::kByte,
                    delete_partial_memory);
}

bool is_partial(const c10::Storage& storage) { return storage.data_ptr().get_deleter() == delete_partial_memory; }

const Slices* slices_of(const c10::Storage& storage) {
  if (storage.data_ptr().get_deleter() != delete_sliced_memory) return nullptr;
  return &static_cast<const SlicedMemory*>(storage.data_ptr().get_context())->slices;
}

void forget_other_slices(const at::Tensor& tensor) {
  const Slices& slices = *slices_of(tensor.storage());
  auto* memory = static_cast<std::byte*>(tensor.storage().mutable_data());
  forget_pages(memory, 0, slices.begin());
  forget_pages(memory, slices.begin() + slices.bytes, slices.bytes * static_cast<size_t>(slices.ranks));
}

}  // namespace lockstep
