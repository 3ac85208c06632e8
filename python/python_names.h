#pragma once

#include <string>

namespace lockstep::python {

/// An error's text of the C++ library with Python's names in place of C++'s: "GradientReduction::kSum" becomes
/// reduction="sum", a DistributedDataParallel that is not torch's a Replica. Every text that leaves the library for
/// Python goes through here.
std::string with_names_of_python(std::string text);

}  // namespace lockstep::python
