"""How many methods and fields the classes of a tree have, and how many lines define them.

Counted are what a reader must keep in mind of a class: methods and fields that it declares itself, public and private.
Constructors and overrides count as methods; destructors, operators, and deleted or defaulted functions do not. Overrides
of an interface that another library declares, such as c10d::Backend, do not count either: that list is the library's. A
class that is written in several files is one class: its methods are those of its declaration, and lines() adds up where
they are defined.

This reads the house's own style (clang-format's layout, no macros that open braces); it is no C++ parser.
"""

import re

OPENS_CLASS = re.compile(r"\b(class|struct)\s+(?:alignas\([^)]*\)\s*)?(?:LOCKSTEP_\w+(?:\([^)]*\))?\s+)?((?:\w+::)*\w+)\s*(?:final\b)?\s*(?::[^;{]*)?$")
NOT_FIELDS = re.compile(r"^(using|typedef|friend|static_assert|enum|class|struct|union|template\s*<[^;]*>\s*(class|struct|using|friend))\b")
ACCESS = re.compile(r"\b(public|private|protected)\s*:(?!:)")


def stripped(text):
    """The text without comments, literals and preprocessor lines; line breaks stay."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', lambda m: '""' + "\n" * m.group().count("\n"), text, flags=re.S)
    text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    text = re.sub(r"(?<![0-9a-fA-F])'(\\.|[^'\\\n])'", "0", text)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"^\s*#(.*\\\n)*.*$", lambda m: "\n" * m.group().count("\n"), text, flags=re.M)


def without(text, opening, closing):
    """The text without what stands between such brackets, the inner ones first."""
    pattern = re.compile(re.escape(opening) + "[^" + re.escape(opening + closing) + "]*" + re.escape(closing))
    while True:
        shorter = pattern.sub("", text)
        if shorter == text:
            return text
        text = shorter


class Class:
    def __init__(self, name, kind, bases=()):
        self.name, self.kind, self.bases = name, kind, bases
        self.methods, self.overrides, self.virtuals, self.fields = [], [], set(), []

    def declare(self, text):
        """`text`: a declaration of the class, without its body."""
        # A closing bracket of an arrow or a comparison is no template's.
        text = ACCESS.sub("", text).replace("->", "").replace(">=", "").strip()
        text = re.sub(r"\[\[[^\]]*\]\]", "", text).strip()
        if not text or NOT_FIELDS.match(text) or re.match(r"^(static\s+)?constexpr\b(?![^=]*\()|^static\s+constexpr\b(?![^=]*\()", text):
            return
        text = without(re.sub(r"\boperator\s*\S+?\s*\(", "operator(", text), "<", ">")
        text = re.sub(r"\bLOCKSTEP_\w+(\([^()]*\))?", "", text)
        text = re.sub(r"\b(alignas|decltype|noexcept|explicit|requires)\s*\([^()]*(\([^()]*\)[^()]*)*\)", "", text)
        head = text.split("=", 1)[0] if not re.search(r"\boperator\b", text) else text
        pointer = re.search(r"\(\s*\*\s*(?:const\s+)?(\w+)\s*\)\s*\(", head)
        if pointer:  # to a function
            self.fields.append(pointer.group(1))
            return
        is_function = "(" in head
        if is_function:
            named = re.search(r"(~?\w+)\s*\(", head)
            if named is None:
                raise ValueError(f"{self.name}: {text}")
            name = named.group(1)
            if name.startswith("~") or "operator" in text or re.search(r"=\s*(delete|default)\s*$", text) or name == "requires":
                return
            if re.search(r"\)[^()]*\b(override|final)\b", text):
                self.overrides.append(name)
                return
            self.methods.append(name)
            if text.startswith("virtual "):
                self.virtuals.add(name)
            return
        if re.match(r"^static\b", text):  # of the class, not of its objects
            return
        # Several in one declaration: `int a, b = 1`.
        flat = without(without(text, "(", ")"), "[", "]")
        for part in flat.split(","):
            name = re.search(r"(\w+)\s*(=.*|:\s*\w+\s*)?$", part.strip(), re.S)
            if name:
                self.fields.append(name.group(1))


def classes(text):
    """The classes of a file, nested ones under their whole names."""
    found, stack, start = [], [], 0  # stack: Class, or None for another brace
    text = stripped(text)
    skip = 0
    for match in re.finditer(r"[{};]", text):
        at, sign = match.start(), match.group()
        if sign == "{":
            before = text[start:at]
            opened = OPENS_CLASS.search(without(ACCESS.sub("", before).replace("->", ""), "<", ">").strip())
            in_class = stack and isinstance(stack[-1], Class)
            if not skip and opened and not re.match(r"\s*enum\b", before):
                outer = next((one.name + "::" for one in reversed(stack) if isinstance(one, Class)), "")
                # Of Regroups<RequestBackend>, both are bases.
                heritage = re.search(r"(?<!:):(?!:)([^:]|::)*$", ACCESS.sub("", before))
                bases = set(re.findall(r"\w+", heritage.group())) if heritage else set()
                one = Class(outer + opened.group(2), opened.group(1), bases)
                found.append(one)
                stack.append(one)
                start = at + 1
            elif not skip and re.search(r"\b(namespace|extern)\b[^;()]*$", before):
                stack.append(None)
                start = at + 1
            else:  # a function's body, an initialiser or an enum: skipped
                if skip == 0:
                    body_begin = at
                    is_enum = bool(re.search(r"\benum\b[^;()]*$", before))
                    declared = before if in_class and not is_enum else None
                    # `name_{...};` and `= {...}` belong to a declaration that ends with a semicolon.
                    is_function = declared is not None and "(" in without(declared.replace("->", ""), "<", ">") and not re.search(r"=\s*$", declared)
                    # A constructor's initialisers may have braces of their own: `: a_{1} {`.
                    opener = (stack[-1] if in_class else None, declared, is_function, at)
                stack.append("skip")
                skip += 1
        elif sign == "}":
            if not stack:
                continue
            top = stack.pop()
            if top == "skip":
                skip -= 1
                if skip == 0:
                    owner, declared, is_function, begin = opener
                    rest = text[at + 1:].lstrip()
                    is_inner = declared is not None and declared.count("(") > declared.count(")")  # of a lambda, say
                    if is_function and not is_inner and not rest.startswith((",", ";", "{")):
                        owner.declare(declared)
                        start = at + 1
                    elif owner is not None and declared is not None:  # an initialiser: the declaration goes on without it
                        text = text[:begin] + " " * (at + 1 - begin) + text[at + 1:]
                    else:
                        start = at + 1
            else:
                start = at + 1
        elif not skip:
            if stack and isinstance(stack[-1], Class):
                stack[-1].declare(text[start:at])
            start = at + 1
    return found


def lines(text):
    """Class -> lines of the functions that a .cpp file defines for it."""
    result, name, start = {}, None, 0
    for number, line in enumerate(stripped(text).splitlines()):
        opened = re.match(r"^[\w:~<>&*,\s]*?\b((?:\w+::)+)~?[\w=!<>+\-*/()\[\]]+\(.*$|^((?:\w+::)+)~?\w+\(.*$", line)
        if name is None and opened and not line.startswith((" ", "}")):
            name, start = (opened.group(1) or opened.group(2)).rstrip(":"), number
            if line.rstrip().endswith(("}", ";")):
                result[name] = result.get(name, 0) + 1
                name = None
        elif name is not None and line.startswith("}"):
            result[name] = result.get(name, 0) + number - start + 1
            name = None
    return result


def count_methods(one, known):
    """Its methods, with the overrides of virtual methods that `known` classes, its bases, declare."""
    by_name = {}
    for other in known:
        by_name.setdefault(other.name.rsplit("::", 1)[-1], []).append(other)
    virtuals, left, seen = set(), set(one.bases), set()
    while left:
        name = left.pop()
        seen.add(name)
        for base in by_name.get(name, []):
            virtuals |= base.virtuals
            left |= base.bases - seen
    return len(one.methods) + sum(name in virtuals for name in one.overrides)


def is_plain_data(one):
    """A struct that has three fields or more for each method: its fields are what it is for."""
    return one.kind == "struct" and 3 * len(one.methods) <= len(one.fields)
