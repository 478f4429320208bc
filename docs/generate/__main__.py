"""Writes the pages of docs/reference that come from the code. With ``--check`` it only names stale ones.

commands.md     every command, argument and option, from the command line's own definition; exit codes
recipe.md       every field of a recipe, from its schema
errors.md       every message that an error is raised with, from the source
python.md       the functions of moepress.api, from their signatures and docstrings
"""

from __future__ import annotations

import sys
from pathlib import Path

import command_page
import error_page
import python_page
import recipe_page

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
PAGES = {
    "commands.md": command_page.page,
    "recipe.md": recipe_page.page,
    "errors.md": error_page.page,
    "python.md": python_page.page,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(f"docs/reference/{name}")
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    verb = "stale, run `python docs/generate`" if "--check" in sys.argv else "written"
    print("\n".join(f"{name}: {verb}" for name in stale) or "docs/reference is up to date")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
