"""The public names of a header: what it declares in a namespace, but for namespaces called detail.

Not a parser of C++, but one of what stands in include/lockstep: types, enums, concepts, aliases, constants, functions.
"""

import re


def without_comments(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', text)


def end_of_braces(text, at):
    depth = 0
    for place in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError("a brace is not closed")


def declarations(text):
    """(namespaces, declaration without its body) of everything at namespace level."""
    namespaces, start, at = [], 0, 0
    while at < len(text):
        if text[at] == "{":
            head = text[start:at].strip()
            space = re.match(r"(?:inline )?namespace([\w: ]*)$", head)
            if space:
                namespaces.append(space.group(1).strip())
                start = at + 1
            else:
                end = end_of_braces(text, at)
                inside = head.count("(") != head.count(")")  # of a default argument
                bare = re.sub(r"\([^()]*\)", "", head)
                is_type = re.search(r"\b(class|struct|enum|union)\b[^()]*$", head) or re.search(r"[^=<>!]=[^=]", bare + " ")
                if inside or is_type or text[end + 1:].lstrip().startswith(";"):
                    text = text[:at] + " {} " + text[end + 1:]
                    at += 3
                else:
                    yield tuple(namespaces), head
                    start = end + 1
                    at = end
        elif text[at] == "}":
            namespaces.pop()
            start = at + 1
        elif text[at] == ";":
            yield tuple(namespaces), text[start:at].strip()
            start = at + 1
        at += 1


def without_template(text):
    while text.startswith("template"):
        depth = 0
        for place, letter in enumerate(text):
            depth += {"<": 1, ">": -1}.get(letter, 0)
            if letter == ">" and depth == 0:
                text = text[place + 1:].strip()
                break
    return text


def without_calls(text, words):
    """Without `word(...)` for these words: what is not the name of a function."""
    while True:
        found = re.search(r"\b(?:" + "|".join(words) + r")\s*\(", text)
        if not found:
            return text
        depth = 0
        for place in range(found.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            if depth == 0:
                text = text[:found.start()] + text[place + 1:]
                break


def name_of(declaration):
    """The name that it declares; None for forward declarations, members defined outside their class, and the like."""
    text = without_template(declaration)
    concept = re.match(r"concept (\w+)", text)
    if concept:
        return concept.group(1)
    kind = re.match(r"(?:class|struct|enum(?: class)?|union) ([\w:]+)(.*)", text, re.DOTALL)
    if kind:
        return kind.group(1) if "{}" in kind.group(2) and "::" not in kind.group(1) else None
    alias = re.match(r"using (\w+) =", text)
    if alias:
        return alias.group(1)
    constant = re.match(r"(?:inline |constexpr |extern |const )+[\w:<>,* ]+?(\w+)\s*=", text)
    if constant:
        return constant.group(1)
    holder = re.match(r"TORCH_MODULE\((\w+)\)", text)
    if holder:
        return holder.group(1)
    text = without_calls(text, ["requires", "decltype", "noexcept"])
    function = re.search(r"([\w:~]+)\s*\(", text)
    return function.group(1) if function and "::" not in function.group(1) else None


def public_names(header_text):
    names = set()
    for namespaces, declaration in declarations(without_comments(header_text)):
        spaces = "::".join(namespaces).split("::")
        if "detail" in spaces or spaces[0] != "lockstep" or not declaration:
            continue
        name = name_of(declaration)
        if name:
            names.add("::".join(spaces[1:] + [name]))
    return names
