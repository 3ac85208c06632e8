"""Prepares the sources of the site: the documents, and pages about what the headers, the launcher and the sources say.

    python3 docs/site/pages.py LAUNCHER FOLDER
"""

import os
import re
import shutil
import subprocess
import sys

import headers
import messages

SOURCE = headers.SOURCE
# Pages that only the site has, by the section of docs/index.md that they follow.
SITE_ONLY = {"When something goes wrong": ["messages"], "Reference": ["api/index", "The header of C <api/c>", "The header of liblockstep_train <api/train_c>", "python_package", "command_line"]}


def read(name):
    with open(os.path.join(SOURCE, name), encoding="utf-8") as file:
        return file.read()


def relinked(text):
    """Links of a document for the site, where all documents lie in one folder and files of the tree are not."""
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    text = re.sub(r"\]\(\.\./README\.md", "](readme.md", text)
    text = re.sub(r"\]\((?:\.\./)?python/README\.md", "](python_package.md", text)
    text = re.sub(r"\]\(\.\./include/lockstep/(\w+\.h)\)", r"](api/\1.md)", text)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|bench/)[^)]+\)", r"\1", text)


def with_anchors(text):
    """errors.md, each row of whose exit codes has an anchor: errors.html#exit-code-49."""
    return re.sub(r"(?m)^\| (\d+) \|", r'| <a id="exit-code-\1"></a>\1 |', text)


def linked_index(text, pages):
    """api.md, whose names lead to the pages of their headers."""
    lines, header = [], None
    for line in text.splitlines():
        heading = re.match(r"## (\w+\.h)$", line)
        header = heading.group(1) if heading else header
        name = re.match(r"- `([\w:]+)`", line)
        if name and header in pages:
            short = name.group(1)
            there = f"\n## {short}\n" in pages[header]
            target = f"api/{header}.md" + (f"#{re.sub('[^a-z0-9_-]', '', short.lower())}" if there else "")
            line = line.replace(f"`{short}`", f"[`{short}`]({target})", 1)
        lines.append(line)
    return "\n".join(lines) + "\n"


def command_line(launcher):
    def said(*words):
        return subprocess.run([launcher, *words], capture_output=True, text=True, check=True, timeout=20).stdout.strip("\n")

    general = said("--help")
    commands = re.findall(r"(?m)^  (\w+) {2,}", general[general.index("Subcommands:"):])
    page = ["# The command line", "", "What `--help` prints. [The launcher](launcher.md) explains it.", "", "## lockstep", "", "```text", general, "```", ""]
    for command in commands:
        page += [f"## lockstep {command}", "", "```text", said(command, "--help"), "```", ""]
    return "\n".join(page)


def target_of(entry):
    """Of an entry of a toctree, which may have a title of its own."""
    return re.sub(r".*<(.*)>", r"\1", entry)


def entries_of(section):
    """The pages that a section of docs/index.md lists, as entries of a toctree."""
    for title, name in re.findall(r"(?m)^- \[([^\]]+)\]\((\w+)\.md\)", section):
        yield f"{title} <{name}>" if name == "readme" else name


def index(names):
    """The home page: docs/index.md, with its sections for the sidebar. `names`: of the documents; what it does not list comes last."""
    home, *sections = re.split(r"(?m)^(?=## )", relinked(read("docs/index.md")))
    contents, seen = [], {"index"}
    for section in sections:
        caption = section.partition("\n")[0].removeprefix("## ")
        entries = [*entries_of(section), *SITE_ONLY.get(caption, [])]
        entries = [entry for entry in entries if target_of(entry) not in seen]
        seen |= {target_of(entry) for entry in entries}
        contents.append((caption, entries))
    contents.append(("More", sorted(names - seen)))
    page = [home]
    for caption, entries in contents:
        if entries:
            page += ["```{toctree}", ":hidden:", ":maxdepth: 1", f":caption: {caption}", "", *entries, "```", ""]
    return "\n".join(page + sections)


def write(folder, name, text):
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main(launcher, folder):
    shutil.rmtree(folder, ignore_errors=True)
    api = {}
    for name in sorted(os.listdir(os.path.join(SOURCE, "include/lockstep"))):
        if name.endswith(".h") and name not in (*headers.OF_C, "lockstep.h"):
            api[name] = headers.cpp_page(os.path.join(SOURCE, "include/lockstep", name))
            write(folder, f"api/{name}.md", api[name])
    toctree = ["```{toctree}", ":maxdepth: 1", "", *(f"{name} <{name}.md>" for name in api), "```", ""]
    write(folder, "api/index.md", "\n".join(["# The headers of C++", "", "[The index](../api.md) lists all names.", "", *toctree]))
    for name in headers.OF_C:
        write(folder, f"api/{name[:-2]}.md", headers.c_page(os.path.join(SOURCE, "include/lockstep", name)))
    names = set()
    for name in sorted(os.listdir(os.path.join(SOURCE, "docs"))):
        path = os.path.join(SOURCE, "docs", name)
        if name.endswith((".svg", ".png")):
            shutil.copy(path, os.path.join(folder, name))
        if name.endswith(".md"):
            text = relinked(read(f"docs/{name}"))
            if name == "errors.md":
                text = with_anchors(text)
            write(folder, name, linked_index(text, api) if name == "api.md" else text)
            names.add(name.removesuffix(".md"))
    write(folder, "readme.md", relinked(read("README.md")))
    write(folder, "python_package.md", relinked(read("python/README.md")))
    write(folder, "command_line.md", command_line(launcher))
    write(folder, "messages.md", messages.page(SOURCE))
    write(folder, "index.md", index(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
