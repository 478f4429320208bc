"""Is a page whole and alone? Read with the standard library's parser: tags closed, ids unique, nothing asked for."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """What a page holds; `problems` is empty when it is well formed and asks for nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.wanted: list[str] = []
        self.words: list[str] = []
        self.sections: dict[str, list[str]] = {}
        self.charts: list[dict[str, str | None]] = []
        self.problems: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]
        self.problems += [f"id {name} twice" for name in {name for name in self.ids if self.ids.count(name) > 1}]
        self.problems += [f"no id {name}" for name in self.wanted if name not in self.ids]

    @property
    def text(self) -> str:
        """All words, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def section(self, name: str) -> str:
        """The words of one section."""
        return " ".join(" ".join(self.sections[name]).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "iframe", "object", "embed", "link", "base", "form"):
            self.problems.append(f"<{tag}>")
        for name, value in found.items():
            self._check(name, value or "")
        if (identity := found.get("id")) is not None:
            self.ids.append(identity)
        self.wanted += (found.get("aria-labelledby") or "").split()
        if tag == "section":
            self.sections[found["id"] or ""] = []
        if tag == "svg":
            self.charts.append(found)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes <{self.open[-1] if self.open else ''}>")
            return
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            if "url(" in data or "@import" in data:
                self.problems.append("the style sheet asks for a file")
            return
        self.words.append(data)
        if "section" in self.open and self.sections:
            self.sections[list(self.sections)[-1]].append(data)

    def _check(self, name: str, value: str) -> None:
        if name.startswith("on"):
            self.problems.append(f"{name}={value[:40]}")
        if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
            if value.startswith("#"):
                self.wanted.append(value[1:])
            elif not value.startswith("data:"):
                self.problems.append(f"{name}={value[:60]}")
        if "url(" in value and "url(#" not in value:
            self.problems.append(f"{name}={value[:60]}")
