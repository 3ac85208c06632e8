#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

/// Weights of which all ranks of a machine hold one copy. A change that each rank makes is thus applied several times;
/// code that saves, compares or sends the weights asks here whether that has happened.
class SharedWeights {
 public:
  /// Describes how something other than the optimizer and this library changed them; empty if nothing did.
  virtual std::string trouble() const = 0;
  /// Tells that this library has set the weights in `storages`, or all of them if that is empty, on this rank, at the
  /// program's request. `values`: see note_weights_set().
  virtual void were_set(const std::vector<const void*>& storages, uint64_t values) = 0;
  /// Called when every rank is about to take the values of rank `root`, which alone may have changed them. Throws on
  /// all ranks.
  /// REQUIRES: every rank calls it.
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

/// Records that the weights in `storages` are wrong and their sharing object is gone. Code that saves, compares or
/// sends them gets `trouble` until this library has set all of them, or `are_there` says that they are gone, too. While
/// held, `are_there` keeps these addresses from being given to other memory. The result knows whether the weights are
/// still wrong.
std::shared_ptr<const SharedWeights> leave_trouble(const std::vector<const void*>& storages, std::string trouble,
                                                   std::function<bool()> are_there);

/// This process's shared weights in any of `storages`, in the order in which they were entered.
std::vector<SharedWeights*> shared_weights_in(const std::vector<const void*>& storages);
std::vector<SharedWeights*> all_shared_weights();
/// The first trouble among these; empty if none.
std::string trouble_of(const std::vector<SharedWeights*>& all);

}  // namespace lockstep
