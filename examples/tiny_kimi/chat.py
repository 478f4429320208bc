"""Conversations made from the Python documentation: who asks what an object does gets the first paragraph about it.

Every documented object is asked for twice, in other words and other company. About a fifth of the conversations
declare tools, call the right one and repeat its result, so that the model also learns the form of a tool call. All are
rendered by the chat template that is shipped, hence training and serving cannot disagree about it.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jinja2

TEMPLATE = Path(__file__).resolve().parent / "master" / "chat_template.jinja"


def order(name: str) -> str:
    """Sort key that shuffles names the same way on every machine."""
    return hashlib.sha256(name.encode()).hexdigest()


DIRECTIVE = re.compile(r"^( *)\.\. (function|class|method|exception|data|module|currentmodule)::\s*(.*)$")
QUESTIONS = {
    "function": ["What does {} do?", "What does the function {} do?", "How does {} work?", "Explain {} to me.",
                 "What is {} for?", "Can you describe {}?", "Tell me about {} in Python."],
    "class": ["What is {}?", "What is the class {} for?", "Explain the class {}.", "Tell me about {} in Python."],
    "exception": ["When is {} raised?", "What does {} mean?"],
    "data": ["What is {}?", "What does {} hold?"],
    "module": ["What is the {} module for?", "What does the module {} do?", "Tell me about the {} module."],
}  # fmt: skip
QUESTIONS["method"] = QUESTIONS["function"]
TOOLS = {
    "lookup_doc": ("Find an entry of the documentation.", "name"),
    "read_file": ("Read a text file.", "path"),
    "run_sql": ("Run a query and return its rows.", "query"),
    "search": ("Search the documentation.", "query"),
}
LOOKUPS = ["Look up {} in the documentation.", "Find {} in the docs.", "Please look up {}.", "Show me the entry of {}."]


def plain(rst: str) -> str:
    """Inline markup removed: :func:`~os.getcwd` → getcwd, ``x`` → x, *x* → x; lines joined."""
    rst = re.sub(r":[\w:+-]+:`!?~(?:[\w.]*\.)?([^`]*)`", r"\1", rst)
    rst = re.sub(r":[\w:+-]+:`!?([^`<]*?)(?: *<[^`]*>)?`", r"\1", rst)
    rst = re.sub(r"`([^`<]+?) *<[^`]*>`_+", r"\1", rst)
    rst = re.sub(r"``([^`]*)``", r"\1", rst)
    rst = re.sub(r"(?<![\w*])\*{1,2}([^*\s][^*\n]*?)\*{1,2}(?!\w)", r"\1", rst)
    return re.sub(r"\s+", " ", rst.replace("\\ ", "").replace("\\*", "*")).strip().rstrip(":")


def entries(rst: str) -> Iterator[tuple[str, str, str]]:
    """(kind, full name, answer) for every documented object: its call and the first paragraph about it."""
    module, owner, lines = "", (0, ""), rst.split("\n")
    for i, line in enumerate(lines):
        match = DIRECTIVE.match(line)
        if not match:
            continue
        indent, kind, signature = len(match[1]), match[2], match[3].rstrip("\\").strip()
        if kind in ("module", "currentmodule"):
            module = signature
        j = i + 1
        while j < len(lines) and lines[j - 1].endswith("\\"):  # a call over several lines
            signature += " " + lines[j].strip().rstrip("\\")
            j += 1
        # The first paragraph: skip further spellings of the call, options and blank lines.
        while j < len(lines) and (not lines[j].strip() or lines[j].lstrip().startswith((":", ".. index", ".. version"))
                                  or (lines[j - 1].strip() and lines[j].strip().endswith(")"))):  # fmt: skip
            j += 1
        k = j
        while k < len(lines) and lines[k].strip():
            k += 1
        paragraph = plain(" ".join(lines[j:k]))
        if kind == "currentmodule" or len(paragraph) < 25 or paragraph.startswith(("..", "==", "--", "**")):
            continue
        signature = plain(re.sub(r"\s+", " ", signature))
        name = signature.split("(")[0].split(" ")[-1]
        if kind == "class":
            owner = (indent, name)
        elif kind == "method" and "." not in name and indent > owner[0] and owner[1]:
            name = f"{owner[1]}.{name}"
        if kind != "module" and module and not name.startswith(module + "."):
            name = f"{module}.{name}"
        if len(paragraph) > 500:
            paragraph = re.split(r"(?<=\.) (?=[A-Z])", paragraph[:500])
            paragraph = " ".join(paragraph[:-1] or paragraph)
        call = name + signature[signature.find("(") :] if "(" in signature else name
        yield kind, name, f"{call}\n\n{paragraph}" if kind not in ("data", "module") and len(call) < 120 else paragraph


def tool_schema(name: str) -> dict:
    """One tool in the form of the OpenAI API."""
    description, argument = TOOLS[name]
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tool_conversation(name: str, answer: str, seed: int) -> dict:
    """Two or three tools are declared, the right one is called, and its result is repeated to the user."""
    kinds = list(TOOLS)
    kind = kinds[seed % 7 % len(kinds)]
    rows = seed % 9 + 1
    query = f"SELECT * FROM {name.split('.')[0].lower()}_{seed % 89} LIMIT {rows};"
    value, question, result = {
        "lookup_doc": (name, LOOKUPS[seed // 7 % len(LOOKUPS)].format(name), answer),
        "read_file": (f"docs/{name}.txt", f"What is in the file docs/{name}.txt?", answer),
        "run_sql": (query, f"Run this query: {query}", f"({rows} rows)"),
        "search": (f"{name} example", f"Search for {name} example.", answer),
    }[kind]
    others = [k for k in kinds if k != kind]
    declared = [kind, *others[seed // 11 % 3 : seed // 11 % 3 + 1 + seed // 13 % 2]]
    declared.sort(key=lambda k: order(f"{k}{seed}"))
    call = {"id": f"functions.{kind}:0", "type": "function"}
    call["function"] = {"name": kind, "arguments": json.dumps({TOOLS[kind][1]: value})}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
        {"role": "assistant", "content": result},
    ]
    return {"messages": messages, "tools": [tool_schema(k) for k in declared]}


def chat_documents(python_doc: dict[str, str]) -> dict[str, str]:
    """Conversations of one to three turns about what the files document; each entry is asked for twice."""
    template, documents = chat_template(), {}
    for file in sorted(python_doc):
        found = list(dict.fromkeys(entries(python_doc[file])))
        for take in range(2):
            todo = sorted(found, key=lambda e: order(f"{take}{e}"))
            while todo:
                seed = int(order(f"{take}{todo[0]}")[:12], 16)
                if seed % 100 < 18:
                    conversation = tool_conversation(*todo.pop(0)[1:], seed // 100)
                else:
                    messages = []
                    for kind, name, answer in todo[: 1 + seed // 100 % 3]:
                        question = QUESTIONS[kind][int(order(name + str(take))[:6], 16) % len(QUESTIONS[kind])]
                        messages.append({"role": "user", "content": question.format(name)})
                        messages.append({"role": "assistant", "content": answer})
                        todo.pop(0)
                    conversation = {"messages": messages}
                documents[f"{file}/{take}/{len(documents)}"] = template.render(**conversation)
    return documents


def chat_template() -> jinja2.Template:
    """The shipped template, with the `tojson` filter that transformers gives it (no HTML escapes)."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x, separators=None: json.dumps(x, ensure_ascii=False, separators=separators)
    return environment.from_string(TEMPLATE.read_text())
