#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/mpi/pump.h"

namespace lockstep::mpi_engine {

/// The Board with the interface of the store that c10d's engines expect. It needs no server, no port and no connection
/// but MPI's. Each key has one writer. add() returns the value known to this rank so far. Keys cannot be deleted on
/// other ranks.
class MpiStore final : public c10d::Store {
 public:
  MpiStore(std::shared_ptr<Pump> pump, std::chrono::milliseconds timeout) : Store(timeout), pump_(std::move(pump)) {}

  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<MpiStore>(*this); }

  using Store::compareSet;
  using Store::set;

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    pump_->set(key, {value.begin(), value.end()});
  }
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override { return static_cast<int64_t>(pump_->board().size()); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  const std::shared_ptr<Pump> pump_;
};

}  // namespace lockstep::mpi_engine
