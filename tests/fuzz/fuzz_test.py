"""Fuzzes the readers of files from seeds that are real files: some seconds each, LOCKSTEP_NIGHTLY=1 ten minutes."""

import gzip
import io
import os
import struct
import sys
import tarfile
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from fuzzing import FuzzTest  # noqa: E402
from support import BIN, main, run  # noqa: E402

PT = os.path.join(BIN, "pt_python")
LOCKSTEP = os.path.join(BIN, "lockstep")

# Words of the formats, which chance would not find.
WORDS = ["torch._utils", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_from_type_v2", "torch", "FloatStorage",
         "UntypedStorage", "torch.storage", "collections", "OrderedDict", "storage", "cpu", "_codecs", "encode", "latin1", "numpy", "dtype",
         "numpy._core.multiarray", "scalar", "builtins", "set", "complex", "Size", "device", "conj", "data.pkl", "byteorder",
         "PK\\x01\\x02", "PK\\x03\\x04", "PK\\x05\\x06", "PK\\x06\\x06", "PK\\x06\\x07", "data_offsets", "__metadata__", "shape", "BOOL", "F32",
         "cifar-10-batches-bin/test_batch.bin", "ustar\\x0000", "ustar  ", "path=", "size=", "GNU.sparse.", "IHDR", "PLTE", "IDAT", "IEND", "tRNS",
         "iCCP", "\\xff\\xda", "\\xff\\xc0", "\\xff\\xc2", "\\xff\\xc4", "\\xff\\xdb", "\\xff\\xdd", "Adobe",
         '\\"type\\":\\"run\\"', '\\"type\\":\\"scalar\\"', '\\"type\\":\\"steps\\"', '\\"type\\":\\"reductions\\"', '\\"buckets\\":[{', '\\"world_size\\":',
         '\\"times_last_by_rank\\":[', '\\"ts\\":', '\\"dur\\":', '\\"reduction\\"', '\\"backward\\"', '\\"Infinity\\"', "<fuzzed", "1e308"]


class Fuzz(FuzzTest):
    words = WORDS

    def files(self):
        """Real .pt files, as they are and without the checksums that no change would survive."""
        found = {}
        for word in ("network", "shared"):
            run(PT, word, self.path(word + ".pt"))
            with open(self.path(word + ".pt"), "rb") as file:
                content = bytearray(file.read())
            found[word] = bytes(content)
            start = 0
            while (start := content.find(b"PK\x01\x02", start)) >= 0:
                struct.pack_into("<I", content, start + 16, 0)
                start += 4
            found[word + "_unsummed"] = bytes(content)
        return found

    def test_pt(self):
        self.fuzz("fuzz_pt", self.files())

    def test_pickle(self):
        self.files()
        self.fuzz("fuzz_pickle", {word: zipfile.ZipFile(self.path(word + ".pt")).read(word + "/data.pkl") for word in ("network", "shared")})

    def test_safetensors(self):
        self.files()
        run(LOCKSTEP, "convert", self.path("network.pt"), self.path("network.safetensors"))
        with open(self.path("network.safetensors"), "rb") as file:
            self.fuzz("fuzz_safetensors", {"network": file.read()})

    def test_idx(self):
        images, labels = struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(range(196)) * 8, struct.pack(">II", 0x801, 5) + bytes(5)
        self.fuzz("fuzz_idx", {"images": images, "labels": labels, "images.gz": gzip.compress(images), "labels.gz": gzip.compress(labels)})

    def test_cifar(self):
        seeds = {}
        for tar_format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w", format=tar_format) as tar:
                for name, size in (("cifar-10-batches-bin/" + "x" * (60 if tar_format == tarfile.USTAR_FORMAT else 120), 10), ("cifar-10-batches-bin/test_batch.bin", 3073)):
                    entry = tarfile.TarInfo(name)
                    entry.size = size
                    tar.addfile(entry, io.BytesIO(bytes(size)))
            seeds[str(tar_format)] = content.getvalue()
            seeds[f"{tar_format}.gz"] = gzip.compress(content.getvalue())
        self.fuzz("fuzz_cifar", seeds)

    def test_image(self):
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "seeds")
        seeds = {}
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), "rb") as file:
                seeds[name] = file.read()
        self.assertGreater(len(seeds), 3)
        self.fuzz("fuzz_image", seeds)

    def test_tokens(self):
        self.fuzz("fuzz_tokens", {"some": struct.pack("<qq", 3, 4) + bytes(range(100)), "beyond": struct.pack("<qq", -1, 1 << 62) + bytes(9)})

    def run_files(self):
        """The files of a small run, by name; event files are small enough to be mutated as a whole."""
        run(LOCKSTEP, "run", "-n", 2, "--", os.path.join(BIN, "write_run"), self.path("run"), 3, cwd=self.folder)
        found = {}
        for folder, _, names in os.walk(self.path("run")):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    content = file.read()
                if len(content) < 30_000:
                    found[os.path.relpath(os.path.join(folder, name), self.path("run")).replace("/", "_")] = content
        return found

    def test_events(self):
        self.fuzz("fuzz_events", {name: content for name, content in self.run_files().items() if ".tfevents." in name})

    def test_report(self):
        files = self.run_files()
        seeds = {name: content for name, content in files.items() if name.startswith("metrics_")}
        seeds.update({name: b"t" + content for name, content in files.items() if name.startswith("trace_")})
        self.assertIn("metrics_rank0.jsonl", seeds)
        self.fuzz("fuzz_report", seeds)


if __name__ == "__main__":
    main()
