#pragma once

#include <string>

namespace lockstep {

/// Writes what ended this process to the file that torchrun and `lockstep run` read, TORCHELASTIC_ERROR_FILE, in
/// torchrun's form. Does nothing without one, or where it is written already. Never throws.
void write_error_file(const std::string& text) noexcept;

/// What such a file says, one line or many; empty where there is none or it is no such file. Reads at most 64 KiB.
std::string read_error_file(const std::string& path);

/// From now on, an exception that ends the process is noted on this rank's page and in the error file before the
/// handler that was there takes over. Again is harmless.
void note_uncaught_exceptions();

}  // namespace lockstep
