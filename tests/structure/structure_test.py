"""The structure of the tree, checked: which layer may include which, what has one home, how long things may be.

The limits are bells. Whoever must ring one writes the file and the reason into EXCEPTIONS; an exception that is no
longer needed fails too.
"""

import os
import re
import subprocess
import sys
import unittest

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import class_sizes  # noqa: E402
import public_names  # noqa: E402

# Folder under src/ -> folders it may include besides itself, by their own headers or by the public ones they answer for.
MAY_INCLUDE = {
    "base": set(),
    "rank_page": {"base"},
    "rendezvous": {"base"},
    "observe": {"base"},
    "report": {"observe", "base"},
    "launch": {"checkpoint", "rendezvous", "rank_page", "base"},  # of checkpoint what needs no torch: it links without
    "hosts": {"launch", "checkpoint", "rendezvous", "base"},  # as launch
    "collectives": {"rendezvous", "rank_page", "base"},
    "c": {"optim", "collectives", "rendezvous", "rank_page", "base"},  # of optim the kernels: it links without torch
    "data": {"base"},
    "reducer": {"collectives", "observe", "rank_page", "base"},
    "checkpoint": {"collectives", "rank_page", "base"},
    "nn": {"collectives", "rank_page", "base"},
    "train": {"reducer", "data", "checkpoint", "collectives", "rank_page", "base"},
    "context": {"launch", "nn", "collectives", "rendezvous", "rank_page", "base"},
    "data_parallel": {"context", "reducer", "nn", "collectives", "observe", "rank_page", "base"},
    "optim": {"reducer", "data_parallel", "checkpoint", "collectives", "rank_page", "base"},
    "diloco": {"optim", "checkpoint", "data_parallel", "context", "reducer", "collectives", "data", "rank_page", "base"},
    "fully_sharded": {"optim", "checkpoint", "data_parallel", "context", "reducer", "collectives", "rank_page", "base"},
    "pipeline": {"checkpoint", "data_parallel", "context", "reducer", "collectives", "rank_page", "base", "data"},
    "run_log": {"data_parallel", "context", "observe", "base"},
    "train_c": {"c", "run_log", "diloco", "data_parallel", "context", "train", "checkpoint", "collectives", "rank_page", "base"},
    "trainer": {"diloco", "run_log", "data_parallel", "context", "train", "checkpoint", "reducer", "data", "observe", "rank_page", "base"},
}
# Public header -> the folder under src/ that answers for it.
HEADERS = {
    "base": "cxx20 error module_on_stack",
    "observe": "observer progress reduction_stats",
    "launch": "spawn",
    "collectives": "group named_tensors state_dict",
    "c": "c",
    "data": "collate data_loader data_loader_options dataset datasets distributed_sampler example_loader from_function image_folder loader loader_stats "
            "sampler shard token_file torch_data transforms",
    "reducer": "backward_passes comm_hook gradient_reduction non_finite_policy",
    "checkpoint": "checkpoint checkpointer group_options has_state master_weights state_in_slices",
    "nn": "sync_batch_norm",
    "train": "activation_checkpoint autocast ema evaluate gather_for_metrics grad_scaler lr_scheduler metrics parameter_groups replay_buffer running_statistics schedule",
    "context": "context device heartbeat mpi program rank_zero",
    "data_parallel": "assert_equal distributed_data_parallel distributed_data_parallel_options kept_memory replica",
    "optim": "elementwise_optimizers sharded_model stepper zero_redundancy_optimizer",
    "diloco": "diloco island",
    "fully_sharded": "fully_sharded_data_parallel memory_estimate sharded_initialization sharded_unit",
    "pipeline": "pipeline",
    "run_log": "run_log summary_writer",
    "trainer": "trainer",
    "train_c": "train_c",
}
# Room of src/collectives/shm/ -> the rooms it may include besides itself.
ROOMS = {
    "segment": set(),
    "kernels": {"segment"},
    "protocol": {"segment", "kernels"},
    "backend": {"segment", "kernels", "protocol"},
}
OWNER = {header: folder for folder, headers in HEADERS.items() for header in headers.split()}
TORCH_FREE = ("src/base/", "src/rank_page/", "src/rendezvous/", "src/observe/", "src/report/", "src/optim/kernels/", "src/launch/", "src/hosts/", "src/collectives/shm/", "src/c/", "src/checkpoint/format/", "src/checkpoint/memory/", "tools/")
KNOWS_TORCH = ("src/collectives/shm/backend/", "tools/doctor_probe.cpp", "tools/result_bits.cpp")

# What has one home: a pattern, the files it may stand in, and why.
HOMES = [
    (r"\bgetenv\b", {"src/base/environment.cpp"}, "environment variables are fields of Environment"),
    (r"torch/csrc/autograd/", {"src/reducer/gradient_hook.h", "src/reducer/gradient_hook.cpp", "src/reducer/whole_backward.h", "src/reducer/whole_backward.cpp", "src/reducer/followed_result.h",
                                "src/reducer/followed_result.cpp"},
     "autograd's internals drift between releases of LibTorch"),
    (r"ProcessGroupGloo", {"src/collectives/gloo/gloo_backend.cpp"}, "the engine's header needs stand-ins"),
    (r"<mpi\.h>", {"include/lockstep/mpi.h", "src/collectives/mpi/mpi_port.h"}, "who includes it is bound to one MPI"),
    (r"ProcessGroupNCCL|USE_C10D_NCCL", {"src/collectives/nccl/nccl_backend.cpp"}, "the engine's header needs CUDA's"),
    (r"std::cout|\bprintf\(|\bputs\(", set(), "the library never writes to stdout"),
    # Called by itself or by its namespace; a group's abort() is another thing.
    (r"(^\s*|\bstd::|\s::)(exit|quick_exit|abort|terminate)\(", set(), "the library never ends the process"),
    (r"^\s*#\s*if", {
        "include/lockstep/c.h", "include/lockstep/train_c.h",  # C++ and C read them
        "src/collectives/torch_releases.h",  # what differs between the releases of LibTorch
        "include/lockstep/cxx20.h",  # what is said to an older standard
        "src/base/thread_annotations.h",  # what only Clang understands
        "src/collectives/shm/segment/futex.h",  # the processor's pause instruction
        "src/base/shared_segment.cpp", "src/collectives/shm/segment/peer_watch.cpp",  # what old kernel headers lack
        "src/collectives/shm/segment/layout.h",  # the explorer's words
        "src/collectives/shm/kernels/reduce.cpp", "src/optim/kernels/step_kernel.cpp",  # kernels of other processors
        "src/collectives/shm/kernels/stream_copy.cpp",  # x86's stores past the caches
        "src/collectives/shm/kernels/write_lines.h",  # x86's fetch of a line to be written, and copy without one
    }, "conditional compilation has a home of its own or is not needed"),
]

EVERYWHERE = (r"\bgetenv\b",)  # in the launcher and the tools, too

LIMITS = [(r"^include/.*\.h$", 200), (r"^(src|tools|examples|bench)/.*\.(cpp|h|py)$", 400), (r"^tests/.*\.(cpp|h|py)$", 600)]
FUNCTION_LINES = 60

EXCEPTIONS = {}  # file -> reason


def tracked(*folders):
    listing = subprocess.run(["git", "ls-files", *folders], cwd=SOURCE, capture_output=True, text=True)
    if listing.returncode == 0 and listing.stdout:
        return listing.stdout.split()
    return [os.path.relpath(os.path.join(root, name), SOURCE) for folder in folders
            for root, _, names in os.walk(os.path.join(SOURCE, folder)) for name in names]


def read(path):
    with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
        return file.read()


def code_of(text):
    """The text without comments and string literals, line by line as it was."""
    text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"//[^\n]*", "", text)


CLASS_METHODS, CLASS_FIELDS, CLASS_LINES = 25, 14, 400

CLASS_EXCEPTIONS = {  # where: class -> reason
    "include/lockstep/group.h: Group": "one method for each collective",
    "include/lockstep/replica.h: Replica": "the public methods of DistributedDataParallel",
    "src/rank_page/rank_page.h: RankPage": "memory that ranks and launcher share: its fields are a record",
}


SOURCES = [path for path in tracked("src", "include", "tools") if path.endswith((".h", ".cpp"))]


class Structure(unittest.TestCase):
    def test_includes_point_down(self):
        wrong, used = [], set()
        for path in SOURCES:
            if path == "include/lockstep/lockstep.h" or path.startswith("tools/"):
                continue
            folder = path.split("/")[1] if path.startswith("src/") else OWNER.get(os.path.basename(path)[:-2])
            self.assertIn(folder, MAY_INCLUDE, f"{path}: no folder answers for it, or one without a layer")
            text = read(path)
            included = set(re.findall(r'#include "(\w+)/', text))
            for header in re.findall(r"#include <lockstep/(\w+)\.h>", text):
                self.assertIn(header, OWNER, f"{path}: lockstep/{header}.h has no folder that answers for it")
                included.add(OWNER[header])
            used |= {(folder, other) for other in included}
            wrong += [f"{path} includes {other}/" for other in sorted(included - {folder} - MAY_INCLUDE[folder])]
        self.assertEqual(wrong, [])
        allowed = {(folder, other) for folder, others in MAY_INCLUDE.items() for other in others}
        self.assertEqual(allowed - used, set(), "edges that nobody uses")

    def test_layers_have_no_cycle(self):
        below, left = set(), dict(MAY_INCLUDE)
        while left:
            free = {folder for folder, others in left.items() if others <= below}
            self.assertTrue(free, f"these include each other: {sorted(left)}")
            below |= free
            left = {folder: others for folder, others in left.items() if folder not in free}

    def test_rooms_of_the_shared_memory_engine_know_those_below(self):
        wrong = []
        for path in tracked("src/collectives/shm"):
            room = path.split("/")[3]
            if path.endswith((".h", ".cpp", ".inc")):
                included = set(re.findall(r'#include "collectives/shm/(\w+)/', read(path)))
                wrong += [f"{path} includes {other}/" for other in sorted(included - {room} - ROOMS[room])]
        self.assertEqual(wrong, [])

    def test_torch_free_folders_are(self):
        wrong = [path for path in SOURCES if path.startswith(TORCH_FREE) and not path.startswith(KNOWS_TORCH)
                 and re.search(r"#include <(torch|ATen|c10)/", read(path))]
        self.assertEqual(wrong, [])

    def test_the_trainer_is_short_and_knows_public_headers_alone(self):
        # The loop and its step; not what its ranks must agree on.
        paths = ["src/trainer/trainer.cpp", "src/trainer/training_step.h", "src/trainer/best_score.h", "include/lockstep/trainer.h"]
        wrong = [f"{path}: {line}" for path in paths for line in re.findall(r"#include.*", read(path))
                 if not re.match(r"#include <(lockstep/\w+\.h|torch/.*|\w+)>$", line)
                 and line not in ('#include "trainer/trainer_agreement.h"', '#include "train/same_data.h"',
                                  '#include "trainer/training_step.h"', '#include "trainer/best_score.h"')]
        self.assertEqual(wrong, [])
        self.assertLess(sum(len(read(path).splitlines()) for path in paths), 560)

    def test_public_headers_name_no_engine_and_no_variable(self):
        variables = re.findall(r'read\("(\w+)"\)', read("src/base/environment.cpp"))
        self.assertIn("WORLD_SIZE", variables)
        wrong = []
        for path in SOURCES:
            if path.startswith("include/"):
                found = set(re.findall(r"\b(?:" + "|".join(variables) + r")\b|\b(?i:gloo|nccl|ucc)\b", read(path)))
                wrong += [f"{path}: {name}" for name in sorted(found)]
        self.assertEqual(wrong, [])

    def test_the_index_has_every_public_name(self):
        index = {}
        for section in read("docs/api.md").split("\n## ")[1:]:
            header, _, lines = section.partition("\n")
            index[header.strip()] = re.findall(r"^- `([\w:]+)`: \S", lines, re.MULTILINE)
            self.assertEqual(len(index[header.strip()]), len(re.findall(r"^\S", lines, re.MULTILINE)), section)
        expected = {}
        for path in SOURCES:
            names = public_names.public_names(read(path)) if path.startswith("include/") else set()
            if names:
                expected[os.path.basename(path)] = sorted(names)
        self.maxDiff = None
        self.assertEqual({header: sorted(names) for header, names in index.items()}, expected)
        self.assertEqual(list(index), sorted(index))

    def test_public_names_are_found(self):
        header = """
            namespace lockstep {
            namespace detail { void hidden(); }
            class Later;
            enum class Kind { kOne };  // class Comment {};
            template <typename T> requires requires(T t) { t(); } struct Held { void member(); int value = 0; };
            template <typename T> concept Callable = requires(T t) { { t() } -> Same; };
            using Alias = int;
            inline constexpr int kConstant = 3;
            inline constexpr const char* kText = "a;" "b";
            [[nodiscard]] inline Held<int> made(const Kind& kind = {}, int n = 1) { return {}; }
            template <Callable F> auto called(F&& f) -> decltype(f()) { return f(); }
            void Later::defined(int x) { }
            class Later::Inner { };
            namespace parts { void part(); }
            int after();
            }  // namespace lockstep
        """
        self.assertEqual(public_names.public_names(header), {"Kind", "Held", "Callable", "Alias", "kConstant", "kText", "made",
                                                             "called", "parts::part", "after"})

    def test_everything_has_one_home(self):
        wrong = []
        for path in SOURCES:
            if path.startswith("src/collectives/gloo/headers/"):
                continue
            text = read(path)
            for pattern, homes, why in HOMES:
                if path.startswith(("src/launch/", "src/hosts/", "tools/")) and pattern not in EVERYWHERE:
                    continue
                subject = text if "/" in pattern else code_of(text)
                if path not in homes and re.search(pattern, subject, re.MULTILINE):
                    wrong.append(f"{path}: {pattern} ({why})")
        self.assertEqual(wrong, [])

    def test_files_and_functions_are_short(self):
        too_long = set()
        for path in tracked("src", "include", "tools", "examples", "bench", "tests"):
            if not path.endswith((".h", ".cpp", ".py")):
                continue
            lines = read(path).splitlines()
            limit = next((limit for pattern, limit in LIMITS if re.match(pattern, path)), None)
            if limit and len(lines) > limit:
                too_long.add(f"{path}: {len(lines)} lines (bell at {limit})")
            if path.startswith("tests/") or not path.endswith(".cpp"):
                continue
            start = None
            for number, line in enumerate(lines):
                if re.match(r"[\w:~<>].*\{$", line) and not re.match(r"(namespace|class|struct|enum|extern|union)\b", line):
                    start = number
                elif line.startswith("}") and start is not None:
                    if number - start > FUNCTION_LINES:
                        too_long.add(f"{path}:{start + 1}: a function of {number - start} lines (bell at {FUNCTION_LINES})")
                    start = None
        unexplained = {entry for entry in too_long if entry.split(":")[0] not in EXCEPTIONS}
        self.assertEqual(unexplained, set())
        self.assertEqual(set(EXCEPTIONS) - {entry.split(":")[0] for entry in too_long}, set(), "exceptions no longer needed")

    def test_classes_are_small(self):
        """Methods and fields of each class, and the lines that define it, in however many files."""
        too_large, lines = set(), {}
        texts = {path: read(path) for path in tracked("src", "include", "tools", "python") if path.endswith((".h", ".cpp", ".inc"))}
        found = {path: class_sizes.classes(text) for path, text in texts.items()}
        known = [one for classes in found.values() for one in classes]
        for path, text in texts.items():
            for one in found[path]:
                if class_sizes.is_plain_data(one):
                    continue
                for what, count, limit in (("methods", class_sizes.count_methods(one, known), CLASS_METHODS), ("fields", len(one.fields), CLASS_FIELDS)):
                    if count > limit:
                        too_large.add(f"{path}: {one.name} has {count} {what} (bell at {limit})")
            if path.endswith(".cpp"):
                for name, count in class_sizes.lines(text).items():
                    key = os.path.dirname(path), name
                    lines[key] = lines.get(key, 0) + count
        too_large |= {f"{folder}: {name} has {count} lines in its .cpp files (bell at {CLASS_LINES})"
                      for (folder, name), count in lines.items() if count > CLASS_LINES}
        explained = {entry for entry in too_large if entry.startswith(tuple(f"{place} has " for place in CLASS_EXCEPTIONS))}
        self.assertEqual(sorted(too_large - explained), [])
        unused = {place for place in CLASS_EXCEPTIONS if not any(entry.startswith(f"{place} has ") for entry in too_large)}
        self.assertEqual(unused, set(), "exceptions no longer needed")

    def test_classes_are_measured(self):
        text = """
        struct Base {
          virtual ~Base() = default;
          virtual void run() = 0;
          virtual int later() const { return 1; }
        };
        class Small final : public Wraps<Base>, public foreign::Library {
         public:
          explicit Small(int a, std::function<void(int)> b) : a_(a), b_{std::move(b)} { start(); }
          ~Small() override { stop(); }
          Small(const Small&) = delete;
          Small& operator=(const Small&) = default;
          bool operator<(const Small& other) const { return a_ < other.a_; }
          void run() override;
          void from_the_library() override;
          int a() const { return a_; }
          std::map<int, std::string> names(const std::vector<std::pair<int, int>>& of = {}) const;
          template <typename T>
          void each(T body) { for (const int one : all()) { body(one); } }
          static std::string text(int of) { return "void f();"; }
          using Callback = std::function<void(int, int)>;
          static constexpr int kLimit = 3;
          enum class Kind { kOne, kTwo };
          struct Inner { int x = 0, y = 0; Kind kind{Kind::kOne}; };  // int z;
         private:
          std::function<void(int, std::string)> b_;
          int a_ = 0, c_ LOCKSTEP_GUARDED_BY(mutex_){1};
          std::vector<Inner> inner_ = {{.x = 1}, {.x = 2}};
          void (*const plain_)(int);
          friend class Other;
        };
        """
        known = class_sizes.classes(text)
        found = {one.name: one for one in known}
        self.assertEqual(found["Base"].virtuals, {"run", "later"})
        self.assertEqual(found["Small"].methods, ["Small", "a", "names", "each", "text"])
        self.assertEqual(found["Small"].overrides, ["run", "from_the_library"])
        self.assertEqual(class_sizes.count_methods(found["Small"], known), 6)
        self.assertEqual(found["Small"].fields, ["b_", "a_", "c_", "inner_", "plain_"])
        self.assertEqual((found["Small::Inner"].methods, found["Small::Inner"].fields), ([], ["x", "y", "kind"]))
        body = "namespace a {\n\nvoid Small::run() {\n  x();\n}\n\nint Small::b() const { return 1; }\nvoid free() {\n}\n}\n"
        self.assertEqual(class_sizes.lines(body), {"Small": 4})


if __name__ == "__main__":
    unittest.main(argv=["structure_test", "-v"])
