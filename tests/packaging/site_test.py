"""The site that `make docs` builds: without a warning, without a network, with all headers, in light and in dark."""

import glob
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "programs"))
from support import LOCKSTEP, SOURCE, main, run  # noqa: E402

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


def anchors(page):
    return set(re.findall(r'\bid="([^"]+)"', page))


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not os.path.exists(os.path.join(SOURCE, ".setup/docs/installed")):
            raise unittest.SkipTest("Sphinx is not installed: scripts/setup --docs")
        cls.folder = tempfile.mkdtemp(prefix="lockstep_test_")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        said = run(os.path.join(SOURCE, "scripts/docs"), cls.folder, timeout=600)  # warnings are errors
        assert said.stderr == "", said.stderr
        cls.site = os.path.join(cls.folder, "html")
        cls.pages = {}
        for path in glob.glob(os.path.join(cls.site, "**/*.html"), recursive=True):
            with open(path, encoding="utf-8") as file:
                cls.pages[os.path.relpath(path, cls.site)] = file.read()

    def test_every_document_and_every_header_has_a_page(self):
        for path in glob.glob(os.path.join(SOURCE, "docs/*.md")):
            self.assertIn(os.path.basename(path).replace(".md", ".html"), self.pages)
        for path in glob.glob(os.path.join(SOURCE, "include/lockstep/*.h")):
            if not path.endswith("/lockstep.h"):
                name = os.path.basename(path)
                self.assertIn(f"api/{name[:-2]}.html" if name in ("c.h", "train_c.h") else f"api/{name}.html", self.pages)

    def test_every_public_name_is_a_heading(self):
        with open(os.path.join(SOURCE, "docs/api.md"), encoding="utf-8") as file:
            sections = re.split(r"(?m)^## ", file.read())[1:]
        missing, seen = [], 0
        for section in sections:
            header = section.splitlines()[0]
            for name in re.findall(r"(?m)^- `(\w+)`", section):
                seen += 1
                if f"{name}<a" not in self.pages[f"api/{header}.html"]:
                    missing.append(f"{header}: {name}")
        self.assertGreater(seen, 120)
        self.assertEqual(missing, [])

    def test_links_lead_somewhere(self):
        broken, seen = [], 0
        for name, page in self.pages.items():
            for link in re.findall(r'<a [^>]*href="([^"]+)"', page):
                link = html.unescape(link)
                if re.match(r"\w+:", link):
                    continue
                seen += 1
                path, _, anchor = link.partition("#")
                target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
                if target not in self.pages and not os.path.exists(os.path.join(self.site, target)):
                    broken.append(f"{name}: {link}")
                elif anchor and target in self.pages and anchor not in anchors(self.pages[target]):
                    broken.append(f"{name}: {link}")
        self.assertGreater(seen, 1000)
        self.assertEqual(broken[:20], [])

    def test_nothing_is_loaded_from_a_network(self):
        for name, page in self.pages.items():
            for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page):
                self.assertNotRegex(tag, r'(?:src|href)="(?:https?:)?//', name)
        for path in glob.glob(os.path.join(self.site, "_static/**/*.css"), recursive=True):
            with open(path, encoding="utf-8") as file:
                self.assertNotRegex(file.read(), r"url\([\"']?(?:https?:)?//|@import", path)

    def test_search_finds_names_and_messages(self):
        with open(os.path.join(self.site, "searchindex.js"), encoding="utf-8") as file:
            index = file.read()
        for word in ("checkpointer", "zeroredundancyoptim", "lockstep_all_reduc", "diverg"):
            self.assertRegex(index, rf'"?\b{word}\w*"?:')

    def test_the_command_line_is_the_launcher_s(self):
        page = html.unescape(re.sub(r"<[^>]+>", "", self.pages["command_line.html"]))
        for option in re.findall(r"(?m)^  (-.*?)  ", run(LOCKSTEP, "run", "--help").stdout):
            self.assertIn(option, page)

    def in_browser(self, name, script, *options, query=""):
        """What `script` writes when it has run in a page of the site: the text of its `out`."""
        probe = os.path.join(self.site, "probe.html")
        with open(probe, "w", encoding="utf-8") as file:
            file.write(self.pages[name].replace("</body>", "<script>window.addEventListener('load', async () => { const out = document.createElement('p');"
                                                f"out.id = 'probe'; {script} document.body.append(out); }});</script></body>"))
        self.addCleanup(lambda: os.path.exists(probe) and os.remove(probe))
        said = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", *options, "--dump-dom",
                               "file://" + probe + query], capture_output=True, text=True, timeout=120)
        text, = re.findall(r'<p id="probe">(.*?)</p>', said.stdout, re.DOTALL)
        return html.unescape(text)

    @unittest.skipIf(CHROMIUM is None, "no Chromium: apt-get install chromium-headless-shell")
    def test_no_table_is_cut_off(self):
        script = ("out.textContent = [...document.querySelectorAll('.table-wrapper')].filter(t => t.scrollWidth > t.clientWidth + 1)"
                  ".map(t => t.innerText.slice(0, 80)).join('|') + (document.documentElement.scrollWidth > innerWidth ? 'the page' : '');")
        wide, seen = {}, 0
        for name, page in self.pages.items():
            if "<table" in page and "/" not in name:
                seen += 1
                said = self.in_browser(name, script, "--window-size=1280,900")
                if said:
                    wide[name] = said
        self.assertGreater(seen, 15)
        self.assertEqual(wide, {})

    @unittest.skipIf(CHROMIUM is None, "no Chromium: apt-get install chromium-headless-shell")
    def test_search_shows_guides_before_lists_of_messages(self):
        script = ("for (let i = 0; i < 100 && !document.querySelector('#search-results ul.search li:nth-child(3)'); ++i) await new Promise(go => setTimeout(go, 50));"
                  "out.textContent = [...document.querySelectorAll('#search-results ul.search li > a')].map(a => a.getAttribute('href')).join(' ');")
        for words in ("checkpoint", "gradient", "shared+memory", "virtual+ranks"):
            found = self.in_browser("search.html", script, query=f"?q={words}").split()
            self.assertGreater(len(found), 3, words)
            first = [link.partition("#")[0] for link in found[:3]]
            self.assertNotIn("messages.html", first, f"{words}: {found[:6]}")

    @unittest.skipIf(CHROMIUM is None, "no Chromium: apt-get install chromium-headless-shell")
    def test_it_is_light_and_dark(self):
        colours = {}
        for scheme, number in (("dark", 0), ("light", 1)):
            probe = os.path.join(self.site, "probe.html")
            with open(probe, "w", encoding="utf-8") as file:
                file.write(self.pages["errors.html"].replace("</body>", "<script>window.addEventListener('load', () => { const out = document.createElement('p');"
                           "out.id = 'probe'; const c = getComputedStyle(document.body); out.textContent = c.backgroundColor + ' ' + c.color + ' ' +"
                           "(document.documentElement.scrollWidth <= innerWidth); document.body.append(out); });</script></body>"))
            said = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
                                   f"--blink-settings=preferredColorScheme={number}", "--dump-dom", "file://" + probe], capture_output=True, text=True, timeout=60)
            colours[scheme], = re.findall(r'<p id="probe">(.*?)</p>', said.stdout)
        brightness = {scheme: [sum(map(int, rgb)) for rgb in re.findall(r"rgb\((\d+), (\d+), (\d+)\)", text)] for scheme, text in colours.items()}
        self.assertGreater(brightness["light"][0], brightness["light"][1] + 300, colours)
        self.assertGreater(brightness["dark"][1], brightness["dark"][0] + 300, colours)
        for text in colours.values():
            self.assertTrue(text.endswith("true"), "the page is wider than the window")


if __name__ == "__main__":
    main()
