#pragma once

#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "base/atomic_file.h"
#include "checkpoint/object_reader.h"
#include "checkpoint/object_writer.h"

namespace lockstep {

/// An object as the bytes of a .pt file.
inline std::string packed(const c10::IValue& object) {
  struct MemorySink : ByteSink {
    void write(const void* data, size_t size) override { bytes.append(static_cast<const char*>(data), size); }
    std::string bytes;
  } sink;
  ObjectWriter(object).write(sink, "rank");
  return std::move(sink.bytes);
}

/// The inverse of packed(). `name` is for messages.
inline c10::IValue unpacked(const at::Tensor& bytes, const std::string& name) {
  const at::Tensor whole = bytes.contiguous();
  const MemorySource source(name, {static_cast<const char*>(whole.const_data_ptr()), whole.nbytes()});
  return ObjectReader(source).object();
}

}  // namespace lockstep
