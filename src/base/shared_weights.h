#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// Weights of which all ranks of a machine hold one copy: a change that each rank makes is made several times. Whoever
/// saves, compares or sends them asks here whether that has happened.
class SharedWeights {
 public:
  /// How they were changed by something else than their optimizer and this library; empty if they were not.
  virtual std::string trouble() const = 0;
  /// This library has set them on this rank, as the program asked it to.
  virtual void were_set() = 0;
  /// Every rank is about to take the values of rank `root`, which alone may have changed them. Every rank calls it;
  /// throws on all ranks.
  virtual void before_broadcast(int root) = 0;

  /// While it lives, the functions below find `weights` by `storages`, the addresses of its tensors' storages.
  class Entry {
   public:
    Entry(SharedWeights& weights, std::vector<const void*> storages);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    const SharedWeights* const weights_;
  };

 protected:
  ~SharedWeights() = default;
};

/// Those of this process that lie in some of `storages`, in the order in which they were entered.
std::vector<SharedWeights*> shared_weights_in(const std::vector<const void*>& storages);
/// All of this process.
std::vector<SharedWeights*> all_shared_weights();
/// The first trouble of these; empty if there is none.
std::string trouble_of(const std::vector<SharedWeights*>& all);

}  // namespace lockstep
