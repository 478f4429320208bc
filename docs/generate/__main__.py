"""Writes the pages of docs/reference that come from the code, and the pictures. With ``--check`` it only names stale ones.

commands.md     every command, argument and option, from the command line's own definition; exit codes
recipe.md       every field of a recipe, from its schema
errors.md       every message that an error is raised with, from the source
python.md       the functions of moepress.api, from their signatures and docstrings
pictures        pipeline, calibration, grid: drawn, and every number in them computed (`pictures`)
"""

from __future__ import annotations

import sys
from pathlib import Path

import command_page
import error_page
import python_page
import recipe_page
from pictures import calibration, grid, pipeline

DOCS = Path(__file__).resolve().parents[1]
PAGES = {
    "reference/commands.md": command_page.page,
    "reference/recipe.md": recipe_page.page,
    "reference/errors.md": error_page.page,
    "reference/python.md": python_page.page,
    "pictures/pipeline.svg": pipeline.svg,
    "pictures/calibration.svg": calibration.svg,
    "pictures/grid.svg": grid.svg,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(f"docs/{name}")
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    verb = "stale, run `python docs/generate`" if "--check" in sys.argv else "written"
    print("\n".join(f"{name}: {verb}" for name in stale) or "docs/reference and docs/pictures are up to date")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
