#pragma once

#include <lockstep/cxx20.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

namespace lockstep {
namespace detail {

/// Receives the calls of a model's units, by unit number.
class UnitCalls {
 public:
  virtual ~UnitCalls() = default;
  virtual void begins(size_t unit) = 0;
  virtual void returns(size_t unit, const std::vector<at::Tensor>& outputs) = 0;
  /// Called also when the unit has thrown.
  virtual void ends(size_t unit) noexcept = 0;
};

struct EarlyUnit;

class UnitBase {
 public:
  /// Takes the result of a ShardedInitialization; null: nothing, or already taken.
  std::shared_ptr<EarlyUnit> take_early() { return std::move(early_); }
  const EarlyUnit* early() const { return early_.get(); }
  void keep_early(std::shared_ptr<EarlyUnit> early) { early_ = std::move(early); }
  /// From now on, reports every forward to `calls`, as long as that lives.
  void attach(std::weak_ptr<UnitCalls> calls, size_t number) {
    calls_ = std::move(calls);
    number_ = number;
  }
  bool is_attached() const { return !calls_.expired(); }

 protected:
  ~UnitBase() = default;
  template <typename Forward>
  auto call(const Forward& forward) {
    const std::shared_ptr<UnitCalls> calls = calls_.lock();
    if (!calls) return forward();
    calls->begins(number_);
    struct End {
      ~End() { calls->ends(number); }
      UnitCalls* calls;
      size_t number;
    } const end{calls.get(), number_};
    auto result = forward();
    std::vector<at::Tensor> outputs;
    collect(result, outputs);
    calls->returns(number_, outputs);
    return result;
  }

 private:
  static void collect(const at::Tensor& tensor, std::vector<at::Tensor>& all) {
    if (tensor.defined()) all.push_back(tensor);
  }
  template <typename T>
  static void collect(const std::optional<T>& one, std::vector<at::Tensor>& all) {
    if (one) collect(*one, all);
  }
  template <typename T>
  static void collect(const std::vector<T>& several, std::vector<at::Tensor>& all) {
    for (const T& one : several) collect(one, all);
  }
  template <typename... T>
  static void collect(const std::tuple<T...>& several, std::vector<at::Tensor>& all) {
    std::apply([&](const T&... one) { (collect(one, all), ...); }, several);
  }
  template <typename A, typename B>
  static void collect(const std::pair<A, B>& both, std::vector<at::Tensor>& all) {
    collect(both.first, all);
    collect(both.second, all);
  }

  std::weak_ptr<UnitCalls> calls_;
  size_t number_ = 0;
  std::shared_ptr<EarlyUnit> early_;
};

/// The last member of a unit, made when the layer is complete. Tells this thread's ShardedInitialization, if there is
/// one.
class MadeUnit {
 public:
  MadeUnit(const torch::nn::Module& layer, UnitBase& unit);
};

/// A `Module` that announces its forward.
template <typename Module, typename Forward = decltype(&Module::forward)>
class Unit;
template <typename Module, typename Base, typename Result, typename... Arguments>
class Unit<Module, Result (Base::*)(Arguments...)> : public Module, public UnitBase {
 public:
  using Module::Module;
  Result forward(Arguments... arguments) {
    return call([&]() -> Result { return Module::forward(std::forward<Arguments>(arguments)...); });
  }

 private:
  MadeUnit made_{*this, *this};
};
template <typename Module, typename Base, typename Result, typename... Arguments>
class Unit<Module, Result (Base::*)(Arguments...) const> : public Unit<Module, Result (Base::*)(Arguments...)> {
 public:
  using Unit<Module, Result (Base::*)(Arguments...)>::Unit;
};

}  // namespace detail

/// A layer whose parameters a FullyShardedDataParallel gathers while it is called. In all else it is a `Holder`, with
/// the same names, members and constructors, and works alone like that layer.
///
///     layers->push_back(lockstep::ShardedUnit<Layer>(width, heads));    // was Layer(width, heads)
///
/// REQUIRES: the layer has one forward, without default arguments, that returns a tensor, or vectors, tuples or
/// optionals of tensors.
template <typename Holder>
using ShardedUnit = torch::nn::ModuleHolder<detail::Unit<typename Holder::ContainedType>>;

}  // namespace lockstep
