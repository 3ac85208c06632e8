#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// CRC-32C (Castagnoli), as in RFC 3720.
uint32_t crc32c(std::string_view bytes);

/// The form stored in records of event files: rotated right by 15 bits, plus 0xa282ead8.
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace lockstep
