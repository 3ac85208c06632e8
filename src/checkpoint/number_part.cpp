#include <cmath>
#include <limits>
#include <sstream>

#include <lockstep/checkpointer.h>
#include <lockstep/error.h>

namespace lockstep::detail {
namespace {

[[noreturn]] void refuse_kind(const c10::IValue& state, const char* wanted) {
  throw Error(std::string("the checkpoint has a ") + state.tagKind() + " here, but the program's variable is a " +
              wanted);
}

template <typename Number>
[[noreturn]] void refuse_size(Number value, Number least, Number most) {
  std::ostringstream text;
  text << "the checkpoint has " << value << " here, but the program's variable holds " << least << " to " << most
       << "; give it a wider type";
  throw Error(text.str());
}

}  // namespace

int64_t whole_number_of(const c10::IValue& state, int64_t least, int64_t most) {
  if (!state.isInt()) refuse_kind(state, "whole number");
  const int64_t value = state.toInt();
  if (value < least || value > most) refuse_size(value, least, most);
  return value;
}

double number_of(const c10::IValue& state, double most) {
  if (!state.isDouble() && !state.isInt()) refuse_kind(state, "number");
  const double value = state.isInt() ? static_cast<double>(state.toInt()) : state.toDouble();
  if (std::isfinite(value) && std::abs(value) > most) refuse_size(value, -most, most);
  return value;
}

bool bool_of(const c10::IValue& state) {
  if (!state.isBool()) refuse_kind(state, "bool");
  return state.toBool();
}

std::string string_of(const c10::IValue& state) {
  if (!state.isString()) refuse_kind(state, "string");
  return state.toStringRef();
}

void check_whole_number(uint64_t value) {
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    throw Error("it is " + std::to_string(value) + ", and a checkpoint can hold whole numbers up to " +
                std::to_string(std::numeric_limits<int64_t>::max()));
}

}  // namespace lockstep::detail
