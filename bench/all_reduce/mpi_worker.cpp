// A rank of an MPI under test. peers.sh builds it with the compiler wrapper of every MPI there is.

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "worker.h"

namespace lockstep::bench {
namespace {

/// Whether the library that is loaded adds up numbers of this type as bfloat16.
bool adds_bf16(MPI_Datatype type) {
  uint16_t number = 0x3f80;  // 1
  return MPI_Allreduce(MPI_IN_PLACE, &number, 1, type, MPI_SUM, MPI_COMM_SELF) == MPI_SUCCESS && number == 0x3f80;
}

/// MPI has no bfloat16; MPICH and Intel's library have each one of their own.
MPI_Datatype find_bf16() {
#ifdef MPICH
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
#ifdef MPIX_BFLOAT16
  MPI_Datatype found = adds_bf16(MPIX_BFLOAT16) ? MPIX_BFLOAT16 : MPI_DATATYPE_NULL;
#else
  MPI_Datatype found = MPI_DATATYPE_NULL;
#endif
  // MPIX_C_BF16, of which MPICH's header knows nothing though the binary interface is one: by handle, if it has that
  // name.
  const auto intel = static_cast<MPI_Datatype>(0x4c000247);
  char name[MPI_MAX_OBJECT_NAME] = "";
  int length = 0;
  if (found == MPI_DATATYPE_NULL && MPI_Type_get_name(intel, name, &length) == MPI_SUCCESS &&
      std::string(name) == "MPIX_C_BF16" && adds_bf16(intel))
    found = intel;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  return found;
#else
  return MPI_DATATYPE_NULL;
#endif
}

class MpiEngine : public Engine {
 public:
  MpiEngine() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
  }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  std::string version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int size = 0;
    MPI_Get_library_version(text, &size);
    std::string first(text, static_cast<size_t>(size));
    first.resize(first.find_first_of(",\n") == std::string::npos ? first.size() : first.find_first_of(",\n"));
    std::string words;
    std::istringstream in(first.c_str());
    for (std::string word; in >> word;) words += (words.empty() ? "" : " ") + word;
    return words;
  }

  std::string why_not(const Case& wanted) const override {
    if (wanted.placement == Placement::kResident) return "MPI gets private memory only";
    if (wanted.dtype == Dtype::kBf16 && adds(wanted) && bf16_ == MPI_DATATYPE_NULL) return "no bfloat16 to add up";
    return "";
  }

  std::shared_ptr<std::byte> allocate_resident(size_t) override { throw std::logic_error("no resident memory"); }

  void prepare(const Case& wanted, std::byte* input, std::byte* output) override {
    case_ = wanted, input_ = input, output_ = output;
    items_ = static_cast<int>(wanted.items(world_size_));
    share_ = static_cast<int>(wanted.share(world_size_));
    type_ = wanted.dtype == Dtype::kFp32 ? MPI_FLOAT : adds(wanted) ? bf16_ : MPI_UINT16_T;
  }

  void run() override {
    switch (case_.operation) {
      case Operation::kAllReduce:
        MPI_Allreduce(MPI_IN_PLACE, output_, items_, type_, MPI_SUM, MPI_COMM_WORLD);
        break;
      case Operation::kBroadcast:
        MPI_Bcast(output_, items_, type_, 0, MPI_COMM_WORLD);
        break;
      case Operation::kAllGather:
        MPI_Allgather(input_, share_, type_, output_, share_, type_, MPI_COMM_WORLD);
        break;
      case Operation::kReduceScatter:
        MPI_Reduce_scatter_block(input_, output_, share_, type_, MPI_SUM, MPI_COMM_WORLD);
        break;
    }
  }

  void barrier() override { MPI_Barrier(MPI_COMM_WORLD); }

 private:
  static bool adds(const Case& wanted) {
    return wanted.operation == Operation::kAllReduce || wanted.operation == Operation::kReduceScatter;
  }

  int rank_ = 0;
  int world_size_ = 1;
  const MPI_Datatype bf16_ = find_bf16();
  Case case_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  int items_ = 0;
  int share_ = 0;
  MPI_Datatype type_ = MPI_FLOAT;
};

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 1;
  try {
    lockstep::bench::MpiEngine engine;
    status = lockstep::bench::serve(engine, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_worker: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
