// Reads files of data sets as a program would, for tests that write them with other tools (compare_data.py):
//
//     read_data cifar10|cifar100|cifar100_coarse PATH train|test OUT
//     read_data images ROOT HEIGHT WIDTH OUT [stretch]
//     read_data tokens PATH 1|2|4 BLOCK OUT
//     read_data decode OUT_FOLDER FILE...
//
// OUT is a .safetensors file of `data` and `target`; `images` prints "target path" of each file; `decode` prints a line
// for each file, "HEIGHT WIDTH" or the error, and leaves the pixels in OUT_FOLDER/NUMBER.

#include <cstdio>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/checkpoint.h>
#include <lockstep/datasets.h>
#include <lockstep/error.h>
#include <lockstep/image_folder.h>
#include <lockstep/token_file.h>

#include "data/file_content.h"
#include "data/image/image.h"

namespace {

using namespace lockstep;
using Words = std::vector<std::string>;

void save_all(const Dataset& data, const std::string& path) {
  std::vector<int64_t> all(static_cast<size_t>(data.size()));
  std::iota(all.begin(), all.end(), 0);
  const Batch batch = data.get(all);
  StateDict tensors;
  tensors.insert("data", batch.data);
  tensors.insert("target", batch.target);
  save(tensors, path);
}

void read_images(const Words& words) {
  datasets::ImageFolderOptions options{.height = std::stol(words[2]), .width = std::stol(words[3]), .as_bytes = true};
  options.stretch = words.size() > 5 && words[5] == "stretch";
  const datasets::ImageFolder data(words[1], options);
  for (int64_t i = 0; i < data.size(); ++i)
    std::printf("%ld %s\n", static_cast<long>(data.target(i)), data.path(i).c_str());
  save_all(data, words[4]);
}

void decode(const Words& words) {
  for (size_t i = 2; i < words.size(); ++i) {
    try {
      const std::vector<uint8_t> bytes = file_content::read_whole(words[i], 1 << 26);
      const Image image = decode_image(words[i], bytes.data(), bytes.size());
      std::printf("%ld %ld\n", static_cast<long>(image.height), static_cast<long>(image.width));
      std::ofstream(words[1] + "/" + std::to_string(i - 2), std::ios::binary)
          .write(reinterpret_cast<const char*>(image.pixels.data()), static_cast<std::streamsize>(image.pixels.size()));
    } catch (const Error& error) {
      std::printf("%s\n", error.what());
    }
  }
}

void run(const Words& words) {
  const std::string& what = words.at(0);
  if (what == "decode") return decode(words);
  if (what == "images") return read_images(words);
  if (what == "tokens") {
    const auto type = words.at(2) == "1"   ? datasets::TokenType::kByte
                      : words.at(2) == "2" ? datasets::TokenType::kUInt16
                                           : datasets::TokenType::kUInt32;
    return save_all(datasets::TokenFile(words[1], {.block_length = std::stol(words.at(3)), .type = type}), words.at(4));
  }
  const Split split = words.at(2) == "train" ? kTrain : kTest;
  if (what == "cifar10") return save_all(datasets::CIFAR10(words[1], split, {.as_bytes = true}), words.at(3));
  save_all(datasets::CIFAR100(words[1], split, {.as_bytes = true, .coarse = what == "cifar100_coarse"}), words.at(3));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(Words(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
