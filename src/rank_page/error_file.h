#pragma once

#include <string>

namespace lockstep {

/// Writes the error that ends this process to TORCHELASTIC_ERROR_FILE, which torchrun and `lockstep run` read, in
/// torchrun's format. Does nothing if the variable is unset or the file exists. Never throws.
void write_error_file(const std::string& text) noexcept;

/// The error in such a file, of one or more lines; empty if there is no such file. Reads at most 64 KiB.
std::string read_error_file(const std::string& path);

/// Makes an exception that ends the process be recorded on this rank's page and in the error file, before the previous
/// handler runs. A second call does nothing.
void note_uncaught_exceptions();

}  // namespace lockstep
