#pragma once

#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/gloo/messages.h"
#include "collectives/hierarchical/carrier.h"

namespace lockstep::hierarchical_engine {

/// Messages over Gloo, which moves them in its own threads.
class GlooCarrier final : public Carrier {
 public:
  /// `engine` connects all ranks of the group.
  explicit GlooCarrier(c10::intrusive_ptr<c10d::Backend> engine) : engine_(std::move(engine)) {}

  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int from, int tag) override;
  int part_tag(int tag, int part) const override { return gloo_engine::part_tag(tag, part); }
  void break_off(int some_peer) override;

 private:
  const c10::intrusive_ptr<c10d::Backend> engine_;
};

}  // namespace lockstep::hierarchical_engine
