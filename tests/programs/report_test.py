"""`lockstep report`: one HTML page that needs nothing else, checked in a real browser if there is one."""

import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

from support import BIN, LOCKSTEP, main, python_with_torch, run, thorough

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
VOID = {"meta", "link", "br", "hr", "img", "input"}  # what HTML closes by itself

# Run in the page: finds what overlaps, sticks out or is empty; then moves a pointer over the first curve.
LOOK = """
const shown = e => e.getClientRects().length > 0;
const found = [], page = document.documentElement;
if (page.scrollWidth > innerWidth) found.push('the page is ' + page.scrollWidth + ' wide');
let texts = 0, curves = 0;
for (const svg of [...document.querySelectorAll('svg')].filter(shown)) {
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const card = svg.closest('section').getBoundingClientRect();
  texts += boxes.length;
  curves += svg.querySelectorAll('polyline.line').length;
  boxes.forEach(([text, box], i) => {
    if (box.left < card.left || box.right > card.right) found.push('sticks out: ' + text);
    if (box.width && innerWidth < 1300 && box.height < 9) found.push('too small: ' + text + ' ' + box.height);
    for (const [other, its] of boxes.slice(i + 1))
      if (box.left < its.right - 1 && its.left < box.right - 1 && box.top < its.bottom - 3 && its.top < box.bottom - 3)
        found.push('overlap: ' + text + ' | ' + other);
  });
}
for (const card of document.querySelectorAll('section'))
  if (![...card.querySelectorAll('svg')].some(shown) && card.innerText.trim().length < 15) found.push('empty: ' + card.innerText);
const chart = [...document.querySelectorAll('svg[data-x]')].filter(shown)[0];
let tip = '';
if (chart) {
  const box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * 0.98, clientY: box.top + 50}));
  tip = document.getElementById('tip').innerText;
}
const result = document.createElement('script');
result.type = 'application/json';
result.id = 'found';
result.textContent = JSON.stringify({found, tip, texts, curves, charts: document.querySelectorAll('svg[data-x]').length}).replaceAll('<', ' ');
document.body.append(result);
"""


class Checker(html.parser.HTMLParser):
    """Notes tags, attributes and text; raises where tags do not match."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)

    def text(self):
        return " ".join(self.texts)


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def big_run(folder, ranks=4, steps=20_000, buckets=6):
    """The files of a longer run on more ranks, made by formulas."""
    os.makedirs(folder, exist_ok=True)
    for rank in range(ranks):
        lines = [{"type": "run", "step": 0, "wall_s": 1.79e9, "format": 1, "rank": rank, "world_size": ranks, "threads": 1, "backend": "shm",
                  "command": ["./train", "--lr", "0.1"], "host": "node", "cpu": "A processor", "versions": {"lockstep": "0.1.0"}}]
        for step in range(1, steps + 1):
            place = {"step": step, "epoch": step * 10 // (steps + 1), "wall_s": 1.79e9 + step / 50}
            noise = 0.2 * math.sin(step * 12.9898) * math.cos(step * 4.1414)
            lines.append({"type": "scalar", **place, "name": "train/loss",
                          "value": "NaN" if step == 77 else 2.3 * math.exp(-step / 4000) + 0.3 + noise * 0.3})
            if step % 1000 == 0:
                lines.append({"type": "scalar", **place, "name": "valid/loss", "value": 2.4 * math.exp(-step / 4000) + 0.4})
                lines.append({"type": "scalar", **place, "name": "valid/accuracy", "value": 0.95 - 0.8 * math.exp(-step / 4000)})
            if step % 50 == 0:
                lines.append({"type": "steps", **place, "steps": 50, "samples": 3200, "seconds": 1 + 0.05 * noise, "longest_s": 0.03,
                              "communication_s": 0.06 + 0.02 * rank + 0.01 * noise})
            if step % 500 == 0:
                lines.append({"type": "reductions", **place, "reductions": step, "bytes": 130 << 20, "backward_ms": 14.0, "wait_ms": 1.2,
                              "overlap": 0.8, "wait_ms_by_rank": [1.4, 1.5, 0.2, 1.3], "times_last_by_rank": [step // 20, step // 20, step * 17 // 20, step // 20],
                              "buckets": [{"first_parameter": f"layers.{9 - b}.attention.projection.weight", "last_parameter": f"layers.{8 - b}.norm.bias",
                                           "parameters": 12, "bytes": (25 if b else 1) << 20, "ready_ms": 1 + 2 * b, "start_ms": 1.3 + 2 * b,
                                           "end_ms": 12.5 + b * 0.5, "wait_ms": 0.2} for b in range(buckets)]})
        lines.append({"type": "end", "step": steps, "wall_s": 1.79e9 + steps / 50, "by": "return"})
        write_lines(os.path.join(folder, f"metrics_rank{rank}.jsonl"), lines)


class Report(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def real_run(self):
        run(LOCKSTEP, "run", "-n", 2, "--", os.path.join(BIN, "write_run"), self.path("run"), 60, cwd=self.folder)
        return self.path("run")

    def report(self, folder, *arguments):
        printed = run(LOCKSTEP, "report", folder, *arguments, cwd=self.folder).stdout.strip()
        with open(os.path.join(self.folder, printed), encoding="utf-8") as file:
            page = file.read()
        checker = Checker(page)
        self.assertEqual(checker.tags.count("script"), 1)
        for tag, name, value in checker.attributes:
            self.assertFalse(name.startswith("on") or name == "src" or tag in ("link", "iframe", "img"), (tag, name))
            if name == "href":
                self.assertNotRegex(value, r"^[a-z]+:|^//")
        self.assertEqual(re.findall(r"https?://[^'\"<\s]*", page), ["http://www.w3.org/2000/svg"])
        self.assertNotRegex(page, r"(?i)@import|url\((?!#)")
        return page, checker

    def test_a_run(self):
        page, checker = self.report(self.real_run())
        text = checker.text()
        for part in ("finished", "2 ranks", "Loss", "train", "valid", "Learning rate", "Throughput", "samples/s", "Communication", "bucket 1", "bucket 2",
                     "2.bias and 2.weight", "Late ranks", "Rank 1 was last in", "One step, rank by rank", "write_run", "AMD" if "AMD" in page else "CPU",
                     "libtorch", "metrics_rank1.jsonl", "trace_rank0.json", "trace_rank1.json", "Not recorded: accuracy", "6 histograms"):
            self.assertIn(part, text)
        links = [value for tag, name, value in checker.attributes if name == "href"]
        self.assertIn("trace_rank0.json", links)
        for link in links:
            self.assertTrue(os.path.exists(self.path("run", link)), link)

    def test_the_page_elsewhere_has_links_that_lead_back(self):
        os.mkdir(self.path("pages"))
        _, checker = self.report(self.real_run(), "-o", self.path("pages", "page.html"))
        links = [value for tag, name, value in checker.attributes if name == "href"]
        self.assertIn("../run/trace_rank0.json", links)
        self.assertFalse(os.path.exists(self.path("run", "report.html")))

    def test_whatever_a_name_holds_stays_text(self):
        evil = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
        folder = self.path("a \"b\" <c> & 'd'")
        os.mkdir(folder)
        bucket = {"first_parameter": evil, "last_parameter": evil, "parameters": 9, "bytes": 5, "ready_ms": 1, "start_ms": 2, "end_ms": 3, "wait_ms": 1}
        write_lines(os.path.join(folder, "metrics_rank0.jsonl"), [
            {"type": "run", "step": 0, "world_size": 2, "command": ["train", evil], "host": evil, "cpu": evil, "backend": evil, "folder": evil,
             "system": evil, "kernel": evil, "versions": {evil: evil}},
            {"type": "scalar", "step": 1, "name": evil, "value": 1}, {"type": "scalar", "step": 1, "name": "train/" + evil, "value": 1},
            {"type": "steps", "step": 1, "steps": 1, "samples": 1, "seconds": 1, "communication_s": 0.5},
            {"type": "reductions", "step": 1, "reductions": 1, "wait_ms_by_rank": [1, 2], "times_last_by_rank": [1, 0], "buckets": [bucket, bucket]},
            {"type": "end", "by": evil}])
        for name in ("trace_rank<img src=x>.json", "rank_\"x.log"):
            open(os.path.join(folder, name), "w").close()
        _, checker = self.report(folder)
        self.assertNotIn("img", checker.tags)
        text = checker.text()
        self.assertGreaterEqual(text.count("<script>alert(1)</script>"), 6)
        self.assertIn("a \"b\" <c> & 'd'", text)

    def test_what_is_no_run_is_refused(self):
        for folder, words in ((self.path("nowhere"), "there is no folder"), (self.folder, "contains neither a run log")):
            result = run(LOCKSTEP, "report", folder, check=False)
            self.assertEqual((result.returncode, result.stdout), (49, ""))
            self.assertIn(words, result.stderr)
        result = run(LOCKSTEP, "report", check=False)
        self.assertEqual(result.returncode, 2)
        result = run(LOCKSTEP, "report", self.real_run(), "-o", "/proc/page.html", check=False)
        self.assertEqual(result.returncode, 49)
        self.assertIn("/proc/page.html", result.stderr)

    def test_a_long_run_costs_seconds_and_a_small_page(self):
        big_run(self.path("run"), steps=100_000)
        start = time.monotonic()
        page, checker = self.report(self.path("run"))
        took = time.monotonic() - start
        print(f"a run of 100,000 steps on 4 ranks: {sum(os.path.getsize(self.path('run', f'metrics_rank{r}.jsonl')) for r in range(4)) >> 20} MiB "
              f"of lines, drawn in {took:.1f} s, a page of {len(page) >> 10} KiB")
        self.assertLess(len(page), 1 << 20)
        self.assertLess(took, 60)
        self.assertIn("1 value NaN or infinite, the first at step 77", checker.text())
        self.assertIn("Rank 2 was last in 85 % of the steps", checker.text())

    def test_event_files_of_pytorch(self):
        python = python_with_torch()
        if not python or subprocess.run([python, "-c", "import tensorboard"], capture_output=True).returncode != 0:
            print("SKIPPED BECAUSE there is no Python with torch and tensorboard: scripts/setup --tests")
            self.skipTest("no Python with torch and tensorboard: scripts/setup --tests")
        run(python, "-c", "import sys\nfrom torch.utils.tensorboard import SummaryWriter\nwith SummaryWriter(sys.argv[1]) as w:\n"
            "  for i in range(50): w.add_scalar('loss/train', 1 / (1 + i), i); w.add_scalar('loss/test', 2 / (1 + i), i)\n", self.path("run"))
        page, checker = self.report(self.path("run"))
        self.assertEqual(page.count('class="line c1" data-name="train"'), 3)
        self.assertEqual(page.count('class="line c3" data-name="test"'), 3)
        self.assertIn("throughput, communication, late ranks, buckets, system (event files do not contain it; the files of a lockstep::RunLog do)", checker.text())


class Browser(Report):
    """The same pages as a person sees them."""

    def setUp(self):
        if not BROWSER:
            print("SKIPPED BECAUSE no Chromium was found: apt-get install chromium-headless-shell")
            self.skipTest("no Chromium: apt-get install chromium-headless-shell")
        super().setUp()

    def browse(self, page, width, dark, *arguments):
        scheme = 0 if dark else 1
        result = run(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1",
                     f"--user-data-dir={self.path('profile')}", f"--blink-settings=preferredColorScheme={scheme}", "--enable-logging=stderr",
                     f"--window-size={width},3600", *arguments, "file://" + page, timeout=120)
        return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]

    def with_script(self, page, script):
        path = page[:-5] + "_looked_at.html"
        with open(page, encoding="utf-8") as source, open(path, "w", encoding="utf-8") as file:
            file.write(source.read().replace("</body>", f"<script>{script}</script></body>"))
        return path

    def look(self, page, width, dark=False):
        dom, console = self.browse(self.with_script(page, LOOK), width, dark, "--dump-dom")
        self.assertEqual(console, [])
        found = json.loads(re.search(r'id="found">(.*?)</script>', dom, re.S).group(1))
        self.assertEqual(found["found"], [], f"at width {width}")
        return found

    def colours(self, page, width, dark):
        """How many pixels have each of the page's colours, and the picture's share of plain background."""
        python = python_with_torch()
        if not python or subprocess.run([python, "-c", "import PIL, numpy"], capture_output=True).returncode != 0:
            print("SKIPPED BECAUSE there is no Python with PIL and numpy: scripts/setup --tests")
            self.skipTest("no Python with PIL and numpy: scripts/setup --tests")
        picture = self.path(f"{width}{'dark' if dark else ''}.png")
        _, console = self.browse(page, width, dark, "--screenshot=" + picture)
        self.assertEqual(console, [])
        counted = run(python, "-c", "import json, sys, numpy as np\nfrom PIL import Image\np = np.asarray(Image.open(sys.argv[1]).convert('RGB')).reshape(-1, 3)\n"
                      "v = (p.astype(int) * (65536, 256, 1)).sum(1)\nc, n = np.unique(v, return_counts=True)\n"
                      "print(json.dumps({'%06x' % k: int(m) for k, m in zip(c, n)}))", picture).stdout
        return json.loads(counted)

    def test_nothing_overlaps_or_sticks_out(self):
        big_run(self.path("big"))
        for name in (self.real_run(), self.path("big")):
            self.report(name)
            for width in (1280, 1060, 800, 390):
                found = self.look(os.path.join(name, "report.html"), width, dark=width == 800)
                self.assertGreaterEqual(found["curves"], 5)
                self.assertGreaterEqual(found["texts"], 40)

    def test_the_pointer_reads_values(self):
        big_run(self.path("big"))
        self.report(self.path("big"))
        tip = self.look(self.path("big", "report.html"), 1280)["tip"].split()
        self.assertEqual(tip[0], "step")
        self.assertGreater(int(tip[1].replace(",", "")), 19_000)
        self.assertEqual(tip[2::2], ["train", "valid"])
        self.assertAlmostEqual(float(tip[3]), 2.3 * math.exp(-5) + 0.3, delta=0.03)
        self.assertAlmostEqual(float(tip[5]), 2.4 * math.exp(-5) + 0.4, delta=0.01)

    @thorough
    def test_curves_and_bars_are_there_in_both_themes(self):
        big_run(self.path("big"))
        self.report(self.path("big"))
        write_lines(self.path("metrics_rank0.jsonl"), [{"type": "run", "step": 0, "world_size": 2}])
        self.report(self.folder)
        for width in (1280, 390):
            for dark, ground, blue, orange, teal in ((False, "f6f7f9", "2563eb", "d9650b", "0f8a75"), (True, "0f1216", "6ea3ff", "f59b4c", "45c7ae")):
                colours = self.colours(self.path("big", "report.html"), width, dark)
                self.assertGreater(colours.get(ground, 0), 10_000)
                for colour, least in ((blue, 1000), (orange, 500), (teal, 200)):
                    self.assertGreater(colours.get(colour, 0), least, (width, dark, colour))
                # A page without data has none of them.
                colours = self.colours(self.path("report.html"), width, dark)
                self.assertGreater(colours.get(ground, 0), 10_000)
                self.assertLess(colours.get(orange, 0) + colours.get(teal, 0), 30)

    def test_a_broken_script_would_be_noticed(self):
        big_run(self.path("big"), ranks=1, steps=100)
        self.report(self.path("big"))
        _, console = self.browse(self.with_script(self.path("big", "report.html"), "nothing.of = 1"), 800, False, "--dump-dom")
        self.assertEqual(len(console), 1)
        self.assertIn("ReferenceError", console[0])

    def test_texts_that_overlap_would_be_noticed(self):
        big_run(self.path("big"), ranks=1, steps=100)
        self.report(self.path("big"))
        move = "const [a, b] = document.querySelectorAll('svg.wide text'); for (const k of ['x', 'y']) b.setAttribute(k, a.getAttribute(k));"
        with self.assertRaisesRegex(AssertionError, "overlap: "):
            self.look(self.with_script(self.path("big", "report.html"), move), 1280)

    def test_nothing_is_fetched(self):
        big_run(self.path("big"), ranks=1, steps=100)
        self.report(self.path("big"))
        script = "fetch('http://127.0.0.1:9/x').catch(() => 0); const i = new Image(); i.src = 'http://127.0.0.1:9/y'; document.body.append(i)"
        _, console = self.browse(self.with_script(self.path("big", "report.html"), script), 800, False, "--dump-dom")
        self.assertTrue(any("Content Security Policy" in line for line in console), console)


# What Browser inherits is tools, not tests.
for name in [name for name in vars(Report) if name.startswith("test_")]:
    setattr(Browser, name, None)

if __name__ == "__main__":
    main()
