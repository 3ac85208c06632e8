#include <map>
#include <string>

// LibTorch's word on how it was built, to be preloaded: it passes for another release.

namespace caffe2 {

const std::map<std::string, std::string>& GetBuildOptions();
const std::map<std::string, std::string>& GetBuildOptions() {
  static const std::map<std::string, std::string> options = {{"TORCH_VERSION", "2.0.7"}};
  return options;
}

}  // namespace caffe2
