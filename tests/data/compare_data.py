"""Files written by Python's tarfile, numpy and PIL, read by read_data, compared. Run by tests/programs/data_files_test.py
with a Python that has numpy and PIL: compare_data.py READ_DATA."""

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zlib

import numpy as np
from PIL import Image

READ_DATA = sys.argv.pop(1)
RANDOM = np.random.default_rng(1)


def read_safetensors(path):
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        content = file.read()
    types = {"U8": np.uint8, "I64": np.int64}
    return {name: np.frombuffer(content[entry["data_offsets"][0]:entry["data_offsets"][1]], types[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items() if name != "__metadata__"}


def photo(height, width):
    """Smooth, with some noise: what JPEG is for."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(x / (7 + c) + c) * np.cos(y / (9 - c)) for c in range(3)]
    return np.clip(np.stack(planes, 2) + RANDOM.normal(0, 3, (height, width, 3)), 0, 255).astype(np.uint8)


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png16(pixels, interlaced=False):
    """[h, w, 3] uint16 as PNG of 16 bits, which PIL cannot write; Adam7 likewise."""
    height, width, _ = pixels.shape
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)] if interlaced else [(0, 0, 1, 1)]
    rows = b""
    for top, left, down, right in passes:
        part = pixels[top::down, left::right]
        rows += b"".join(b"\0" + row.astype(">u2").tobytes() for row in part if part.shape[1])
    return (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, int(interlaced)))
            + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b""))


class Data(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep_data_")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, *names):
        path = os.path.join(self.folder, *names)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def read(self, *words, check=True):
        result = subprocess.run([READ_DATA, *map(str, words)], capture_output=True, text=True, timeout=120)
        if check:
            self.assertEqual(result.returncode, 0, result.stderr)
        return result

    # ---- CIFAR ----

    def test_cifar(self):
        def batch(count, labels):
            return RANDOM.integers(0, 256, (count, 3072), np.uint8), [RANDOM.integers(0, top, (count, 1)).astype(np.uint8) for top in labels]

        for name, folder, labels, train, test in (("cifar10", "cifar-10-batches-bin", (10,), [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"),
                                                  ("cifar100", "cifar-100-binary", (20, 100), ["train.bin"], "test.bin")):
            batches = {member: batch(5 + i, labels) for i, member in enumerate([*train, test])}
            for tar_format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
                archive = self.path(f"{name}_{tar_format}.tar.gz")
                with tarfile.open(archive, "w:gz", format=tar_format) as tar:
                    entry = tarfile.TarInfo(folder)
                    entry.type = tarfile.DIRTYPE
                    tar.addfile(entry)
                    for member, (pixels, columns) in reversed(batches.items()):
                        content = np.concatenate([*columns, pixels], 1).tobytes()
                        entry = tarfile.TarInfo(f"{folder}/{member}")
                        entry.size = len(content)
                        entry.mtime = 1234567890.25  # a pax header of its own
                        tar.addfile(entry, io.BytesIO(content))
                for split, members in (("train", train), ("test", [test])):
                    self.read(name, archive, split, self.path("out.safetensors"))
                    found = read_safetensors(self.path("out.safetensors"))
                    pixels = np.concatenate([batches[member][0] for member in members])
                    np.testing.assert_array_equal(found["data"].reshape(-1, 3072), pixels)
                    np.testing.assert_array_equal(found["target"], np.concatenate([batches[member][1][-1][:, 0] for member in members]))
                    if name == "cifar100":
                        self.read("cifar100_coarse", archive, split, self.path("out.safetensors"))
                        np.testing.assert_array_equal(read_safetensors(self.path("out.safetensors"))["target"], batches[members[0]][1][0][:, 0])

    # ---- images ----

    def decode(self, contents):
        """Pixels, or the error, of each of the files."""
        paths = []
        for i, content in enumerate(contents):
            paths.append(self.path("files", str(i)))
            with open(paths[-1], "wb") as file:
                file.write(content)
        out = self.path("pixels", "x")
        lines = self.read("decode", os.path.dirname(out), *paths).stdout.splitlines()
        self.assertEqual(len(lines), len(paths))
        result = []
        for i, line in enumerate(lines):
            if not line.replace(" ", "").isdigit():
                self.assertTrue(line.startswith(paths[i] + ": "), line)
                result.append(line)
                continue
            with open(self.path("pixels", str(i)), "rb") as file:
                result.append(np.frombuffer(file.read(), np.uint8).reshape(*map(int, line.split()), 3))
        return result

    @staticmethod
    def encoded(image, kind, **options):
        content = io.BytesIO()
        image.save(content, kind, **options)
        return content.getvalue()

    def test_png_is_exactly_pil_s(self):
        colour = Image.fromarray(photo(37, 53))
        images = [colour.convert(mode) for mode in ("RGB", "L", "1", "P", "RGBA", "LA")]
        images[4].putalpha(images[1])
        contents = [self.encoded(image, "PNG") for image in images]
        contents.append(self.encoded(images[3], "PNG", transparency=3))
        contents.append(self.encoded(colour.quantize(4), "PNG", bits=2))
        contents += [png16((photo(21, 30).astype(np.uint16) << 8) + 77, interlaced) for interlaced in (False, True)]
        for content, pixels in zip(contents, self.decode(contents)):
            np.testing.assert_array_equal(pixels, np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))

    def test_jpeg_is_nearly_pil_s(self):
        colour = Image.fromarray(photo(67, 90))
        contents = [self.encoded(colour, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
                    for quality in (60, 95) for subsampling in (0, 1, 2) for progressive in (False, True)]
        contents.append(self.encoded(colour.convert("L"), "JPEG", quality=90))
        contents.append(self.encoded(colour.convert("CMYK"), "JPEG", quality=95))
        for content, pixels in zip(contents, self.decode(contents)):
            expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
            difference = np.abs(pixels - expected)
            self.assertLessEqual(difference.max(), 4)
            self.assertLessEqual(difference.mean(), 0.25)

    def test_truncated_images_are_refused(self):
        for kind in ("PNG", "JPEG"):
            content = self.encoded(Image.fromarray(photo(24, 24)), kind)
            # The last two bytes of a JPEG are its end marker; nothing of the picture is in them.
            cuts = [content[:size] for size in range(0, len(content) - (2 if kind == "JPEG" else 0), 1 if len(content) < 1500 else 3)]
            for cut, found in zip(cuts, self.decode(cuts)):
                self.assertIsInstance(found, str, f"{kind} of {len(cut)} of {len(content)} bytes was taken for whole")
                self.assertRegex(found, r"is neither JPEG nor PNG|is a truncated or corrupt (JPEG|PNG) file: .* of \d+ bytes")

    def test_changed_images_do_no_harm(self):
        png = self.encoded(Image.fromarray(photo(24, 24)), "PNG")
        changed = [png[:at] + bytes([png[at] ^ 0x20]) + png[at + 1:] for at in range(8, len(png), 5)]
        refused = sum(isinstance(found, str) for found in self.decode(changed))
        self.assertGreater(refused, 0.9 * len(changed), "each chunk has a checksum")

    def test_bombs_are_refused_before_memory_is_taken(self):
        header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
        jpeg = bytearray(self.encoded(Image.fromarray(photo(24, 24)), "JPEG"))
        at = jpeg.find(b"\xff\xc0")
        jpeg[at + 5:at + 9] = struct.pack(">HH", 60000, 60000)
        found = self.decode([b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000)), bytes(jpeg)])
        for text in found:
            self.assertIn("an image of 60000 x 60000 pixels, expected at least one and at most 67108864", text)

    def test_image_folder(self):
        root = self.path("root", "x")[:-2]
        sizes = {"b/2.png": (40, 31), "b/deep/1.png": (20, 64), "a/z.png": (33, 33), "a/y.jpg.png": (100, 100), "c/0.png": (5, 7)}
        images = {name: Image.fromarray(photo(*size)) for name, size in sizes.items()}
        for name, image in images.items():
            image.save(self.path("root", name), "PNG")
        order = []
        for target, kind in enumerate(sorted(os.listdir(root))):  # as torchvision's make_dataset
            for folder, _, names in sorted(os.walk(os.path.join(root, kind), followlinks=True)):
                order += [(target, os.path.join(folder, name)) for name in sorted(names)]
        for shape, stretch in (((16, 24), True), ((16, 24), False), ((48, 48), False), ((1, 1), False)):
            height, width = shape
            lines = self.read("images", root, height, width, self.path("out.safetensors"), "stretch" if stretch else "crop").stdout.splitlines()
            self.assertEqual(lines, [f"{target} {path}" for target, path in order])
            found = read_safetensors(self.path("out.safetensors"))
            np.testing.assert_array_equal(found["target"], [target for target, _ in order])
            for pixels, (_, path) in zip(found["data"], order):
                image = images[os.path.relpath(path, root)]
                box = (0, 0, *image.size)
                if not stretch:
                    part = min(image.size[0], image.size[1] * width / height), min(image.size[1], image.size[0] * height / width)
                    box = tuple((whole - cut) / 2 for whole, cut in zip(image.size, part))
                    box += tuple(low + cut for low, cut in zip(box, part))
                expected = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box)).astype(int)
                difference = np.abs(pixels.transpose(1, 2, 0) - expected)
                self.assertLessEqual(difference.max(), 1, f"{path} to {shape}")
        with open(self.path("root", "a", "z.png"), "r+b") as file:
            file.truncate(100)
        result = self.read("images", root, 8, 8, self.path("out.safetensors"), check=False)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"root/a/z\.png: is a truncated or corrupt PNG file")

    # ---- tokens ----

    def test_tokens(self):
        for size, kind in ((1, "<u1"), (2, "<u2"), (4, "<u4")):
            tokens = RANDOM.integers(0, 1 << (8 * size), 1003).astype(kind)
            tokens.tofile(self.path("tokens.bin"))
            self.read("tokens", self.path("tokens.bin"), size, 16, self.path("out.safetensors"))
            found = read_safetensors(self.path("out.safetensors"))
            count = (1003 - 1) // 16
            np.testing.assert_array_equal(found["data"].reshape(-1), tokens[:16 * count].astype(np.int64))
            np.testing.assert_array_equal(found["target"].reshape(-1), tokens[1:16 * count + 1].astype(np.int64))


if __name__ == "__main__":
    unittest.main(argv=["compare_data", "-v"])
