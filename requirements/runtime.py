"""The packages that an installed moepress needs at run time, pinned as they are here: ``name==version``, one a line.

Development tools share the environment and are left out: what is printed is the closure of the wheel's own requirements.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(root: str) -> dict[str, str]:
    """Every package below `root`, by name, with its version here. Extras that a requirement asks for are followed."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is needed and not installed: pip install --constraint constraints.txt ."
            ) from None
        if name != root:
            found[canonicalize_name(name)] = package.version
        for text in package.requires or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            if wanted:
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


if __name__ == "__main__":
    for name, version in sorted(closure("moepress").items()):
        print(f"{name}=={version.partition('+')[0]}")
