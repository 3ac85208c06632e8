"""Pages about headers: what is declared, with the comment before it, in the order of the file.

Not a parser of C and C++, but one of what stands in include/lockstep.
"""

import functools
import os
import re
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(SOURCE, "tests", "structure"))
from public_names import name_of, without_comments  # noqa: E402

OF_C = ("c.h", "train_c.h")  # headers in C


def prose(lines):
    """Comment lines as Markdown: names with <, * or _ stay as they are, and indented lines are a program."""
    parts, program = [], []

    def close():
        if program:
            parts.extend(["```cpp", *program, "```", ""])
            program.clear()

    for line in lines:
        if line.startswith("    "):
            program.append(line[4:])
            continue
        close()
        pieces = line.split("`")
        for i in range(0, len(pieces), 2):
            pieces[i] = re.sub(r"([<>*\[\]_#|])", r"\\\1", pieces[i])
        parts.append("`".join(pieces) if len(pieces) % 2 else line.replace("`", "\\`"))
    close()
    return "\n".join(parts)


def without_private(code):
    """A class without its private part, and without bodies of functions that are several lines long."""
    result, hidden = [], False
    for line in code.splitlines():
        if re.match(r"^ (private|protected):", line):
            hidden = True
        elif re.match(r"^ public:", line) or line.startswith("}"):
            hidden = False
        if not hidden:
            result.append(line)
    return "\n".join(result)


def depth_change(line):
    bare = re.sub(r"//.*", "", re.sub(r'"(\\.|[^"\\])*"', '""', line))
    return sum(bare.count(letter) for letter in "{(") - sum(bare.count(letter) for letter in "})")


def blocks(text):
    """(comment lines, code lines) of everything at namespace level of a header of C++."""
    comment, code, depth = [], [], 0
    for line in text.splitlines():
        at_top = depth == 0 and not code
        if at_top and re.match(r"///?( |$)", line):
            comment.append(re.sub(r"^///? ?", "", line))
        elif at_top and (not line.strip() or line.startswith("#") or re.match(r"(inline )?namespace[\w: ]*\{$|\}$|\}  // namespace", line)):
            if not line.strip() and comment:
                yield comment, []
            if not line.strip():
                comment = []
        else:
            code.append(line)
            depth += depth_change(line)
            if depth == 0 and re.search(r"[;}]\s*(//.*)?$", line):
                yield comment, code
                comment, code = [], []


def without_details(text):
    return re.sub(r"^namespace [\w:]*detail[\w:]* \{.*?^\}  // namespace [\w:]*detail[\w:]*$", "", text, flags=re.MULTILINE | re.DOTALL)


def public_members(code):
    """(name, first sentence of its comment) of the public functions of a class, in order."""
    members, comment, declaration, depth = [], [], "", 0
    for line in without_private(code).splitlines()[1:]:
        text = line.strip()
        if depth == 0 and not declaration and text.startswith("///"):
            comment.append(text[3:].strip())
            continue
        declaration += " " + re.sub(r"//.*", "", text)
        depth += depth_change(line)
        if depth == 0 and re.search(r"[;}:]\s*(//.*)?$", text) or not text:
            bare = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", declaration))
            name = re.search(r"(?<![~\w])(\w+)\(", re.sub(r"\[\[\w+\]\]", "", bare))
            if name and not re.search(r"\boperator\b|\bfriend\b|= delete", bare) and name[1] not in dict(members):
                sentence = re.match(r".*?(?:(?<!\.)[.:;](?= |$)|$)", " ".join(comment)).group(0).rstrip(":;")
                members.append((name[1], sentence if not sentence or sentence.endswith(".") else sentence + "."))
            comment, declaration = [], ""
    return members


@functools.cache
def classes():
    """Name -> (header, code) of the public classes."""
    found = {}
    for header in sorted(os.listdir(os.path.join(SOURCE, "include/lockstep"))):
        if header.endswith(".h") and header not in OF_C:
            with open(os.path.join(SOURCE, "include/lockstep", header), encoding="utf-8") as file:
                for _, code in blocks(without_details(file.read())):
                    name = re.search(r"^(?:class|struct) (\w+)\b(?!::)[^;]*\{", "\n".join(code), re.MULTILINE)
                    if name:
                        found[name[1]] = (header, "\n".join(code[next(i for i, line in enumerate(code) if re.match("class|struct", line)):]))
    return found


def inherited(code, here):
    """What a class has from a public class of this library: its reader looks for it here."""
    lines = []
    for base in re.findall(r"\bpublic (?:lockstep::)?(\w+)", code.partition("{")[0]):
        header, of_base = classes().get(base, (None, ""))
        own = dict(public_members(code))
        members = [(name, sentence) for name, sentence in public_members(of_base) if name != base and name not in own]
        if members:
            there = "" if header == here else header + ".md"
            lines += [f"### Inherited from {base}", "", f"[`{base}`]({there}#{base.lower()}) says more about each.", ""]
            lines += [f"- [`{name}`]({there}#{base.lower()})" + (f": {prose([sentence])}" if sentence else "") for name, sentence in members]
            lines.append("")
    return lines


def cpp_page(path):
    """The page of a header; its names are headings, so that they are found and can be linked."""
    with open(path, encoding="utf-8") as file:
        text = without_details(file.read())
    page, seen = [f"# {os.path.basename(path)}", "", f"`#include <lockstep/{os.path.basename(path)}>`", ""], set()
    for comment, code in blocks(text):
        source = "\n".join(code)
        bare = re.sub(r"\[\[\w+\]\] ?", "", without_comments(source)).strip()
        name = name_of(re.sub(r"\{.*\}", "{}", bare, flags=re.DOTALL).rstrip(";").strip()) if bare else None
        if name and name not in seen:
            page += [f"## {name}", ""]
            seen.add(name)
        if comment:
            page += [prose(comment), ""]
        if bare and (name or not re.match(r"(class|struct) \w+;|template", bare)):
            page += ["```cpp", without_private(source), "```", ""]
            page += inherited(source, os.path.basename(path))
    return "\n".join(page) + "\n"


def c_page(path):
    """A header of OF_C, whose comments are C's."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    name = os.path.basename(path)
    page = [f"# {name}", "", f"`#include <lockstep/{name}>`; [how to use it](../{name[:-2]}.md).", ""]
    inside = text[:text.rindex("#ifdef __cplusplus")]
    for part in re.split(r"\n\s*\n", inside):
        part = re.sub(r"^#(ifndef LOCKSTEP_\w+_H|define LOCKSTEP_\w+_H|include.*)$\n?", "", part, flags=re.MULTILINE)
        if not part.strip() or re.match(r'\s*#if|\s*extern "C"', part):
            continue
        for name in re.findall(r"^LOCKSTEP_API [\w ]+[ *](\w+)\(", part, re.MULTILINE):
            page.append(f"({name})=")
        page += ["```c", part.replace("LOCKSTEP_API ", "").strip("\n"), "```", ""]
    return "\n".join(page) + "\n"
