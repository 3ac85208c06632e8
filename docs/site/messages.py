"""Every message that the sources throw, with `...` for what is known only when it is thrown."""

import os
import re

THROWS = re.compile(r"\bthrow [\w:]+[({]|\breturn (?:lockstep::)?\w*Error\(|\bTORCH_CHECK\(|\brefuse\(")
LITERAL = re.compile(r'"((?:\\.|[^"\\])*)"')
AREAS = {"base": "The system", "c": "The library for C", "checkpoint": "Checkpoints", "collectives": "Collectives", "context": "Joining", "data": "Data",
         "data_parallel": "DistributedDataParallel", "diloco": "DiLoCo", "fully_sharded": "FullyShardedDataParallel", "launch": "The launcher", "nn": "Layers", "observe": "Logs", "optim": "Optimizers", "pipeline": "Pipeline",
         "rank_page": "The launcher", "reducer": "Gradients", "rendezvous": "Joining", "report": "Reports", "run_log": "Logs", "train": "Training",
         "trainer": "Trainer", "tools": "The command line"}


def arguments(text, start):
    """The text between the parenthesis before `start` and its partner."""
    depth, at = 1, start
    while depth and at < len(text):
        literal = LITERAL.match(text, at)
        if literal:
            at = literal.end()
            continue
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start:at - 1]


def message(code):
    """The literals of an expression, joined; other parts between them become `...`."""
    result, at = "", 0
    for literal in LITERAL.finditer(code):
        between = code[at:literal.start()]
        if between.strip() == ":":
            result += "/"  # one or the other
        elif re.search(r"\w", between):
            result += "..."
        result += literal.group(1)
        at = literal.end()
    if result and re.search(r"\w", code[at:]):
        result += "..."
    result = re.sub(r"%[-\w.]*[dsuzf]", "...", result).replace("\\n", " ").replace('\\"', '"').replace("\\\\", "\\")
    return re.sub(r"(\.\.\.\s*){2,}", "... ", result).strip()


def first_argument_dropped(code):
    depth = 0
    for at, letter in enumerate(code):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            return code[at + 1:]
    return ""


def all_messages(source):
    """Area -> messages, sorted."""
    found = {}
    for top in ("src", "tools"):
        for root, _, names in os.walk(os.path.join(source, top)):
            folder = os.path.relpath(root, source).split(os.sep)
            area = AREAS.get(folder[1] if top == "src" and len(folder) > 1 else top)
            for name in names:
                if not name.endswith((".cpp", ".h")) or area is None:
                    continue
                with open(os.path.join(root, name), encoding="utf-8") as file:
                    text = file.read()
                for call in THROWS.finditer(text):
                    code = arguments(text, call.end())
                    if "TORCH_CHECK" in call.group(0):
                        code = first_argument_dropped(code)
                    said = message(code)
                    if len(re.findall(r"[A-Za-z]{2,}", said)) >= 3:
                        found.setdefault(area, set()).add(said)
    return {area: sorted(said, key=str.lower) for area, said in sorted(found.items())}


def slug(text):
    words = re.findall(r"[a-z0-9_]+", text.lower())
    return "m-" + "-".join(words)[:80]


def page(source):
    lines = ["# All messages", "", "Texts that the libraries and the launcher may throw, by area; `...` stands for names and numbers.",
             "[Error messages](errors.md) explains those that programs meet most.", ""]
    seen = set()
    for area, texts in all_messages(source).items():
        lines += [f"## {area}", ""]
        for text in texts:
            anchor = slug(text)
            number = 1
            while anchor in seen:
                number += 1
                anchor = f"{slug(text)}-{number}"
            seen.add(anchor)
            fence = "``" if "`" in text else "`"
            lines += [f"({anchor})=", f"{fence} {text} {fence} [#](#{anchor})", ""]
    return "\n".join(lines)
