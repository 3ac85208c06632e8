#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// "tag 5"; "tags 5, 6"; "tags 1, 2, 3, 4, 5, 6, 7, 8 and others"; empty for none. Duplicates count once.
inline std::string text_of_tags(std::vector<int64_t> tags) {
  constexpr size_t kShown = 8;
  std::sort(tags.begin(), tags.end());
  tags.erase(std::unique(tags.begin(), tags.end()), tags.end());
  std::string text;
  for (size_t i = 0; i < std::min(tags.size(), kShown); ++i)
    text += (i > 0 ? ", " : tags.size() == 1 ? "tag " : "tags ") + std::to_string(tags[i]);
  return tags.size() > kShown ? text + " and others" : text;
}

inline constexpr std::string_view kOnly = "only ";
/// What has come of a message whose sender is gone.
inline std::string part_of_message(size_t moved, size_t bytes, int64_t tag) {
  return std::string(kOnly) + std::to_string(moved) + " of " + std::to_string(bytes) + " bytes of a message with tag " +
         std::to_string(tag);
}

/// The text for a rank whose receive can no longer have a sender. `tags` is text_of_tags() of the messages that the
/// peer has sent and this rank has not received, or part_of_message().
inline std::string unreceived(const std::string& sender, const std::string& receiver, const std::string& tags) {
  if (tags.starts_with(kOnly)) return sender + " had sent " + receiver + " " + tags + " by then.";
  return (tags.empty() ? "Every message of " + sender + " to " + receiver + " has been received"
                       : sender + " has sent a message with " + tags + ", which " + receiver + " has not received") +
         ". Every send needs a recv with the same tag.";
}

}  // namespace lockstep
