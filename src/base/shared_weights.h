#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

/// Weights of which all ranks of a machine hold one copy: a change that each rank makes is made several times. Whoever
/// saves, compares or sends them asks here whether that has happened.
class SharedWeights {
 public:
  /// How they were changed by something else than their optimizer and this library; empty if they were not.
  virtual std::string trouble() const = 0;
  /// This library has set those in `storages`, or if that is empty all of them, on this rank, as the program asked it
  /// to. `values`: see note_weights_set().
  virtual void were_set(const std::vector<const void*>& storages, uint64_t values) = 0;
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

/// The weights in `storages` are wrong, and what shared them has gone: whoever saves, compares or sends them is told
/// `trouble` until this library has set all of them, or `are_there` says that they have gone as well. While it is held,
/// `are_there` keeps these addresses from being given to other memory. The result knows whether they are still wrong.
std::shared_ptr<const SharedWeights> leave_trouble(const std::vector<const void*>& storages, std::string trouble,
                                                   std::function<bool()> are_there);

/// Those of this process that lie in some of `storages`, in the order in which they were entered.
std::vector<SharedWeights*> shared_weights_in(const std::vector<const void*>& storages);
/// All of this process.
std::vector<SharedWeights*> all_shared_weights();
/// The first trouble of these; empty if there is none.
std::string trouble_of(const std::vector<SharedWeights*>& all);

}  // namespace lockstep
