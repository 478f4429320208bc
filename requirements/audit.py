"""``make audit``: known vulnerabilities of the versions that constraints.txt pins, asked of whoever answers.

PyPI's advisories first, then OSV's, which hold the same ones. pip-audit ends alike when a version has a vulnerability and when
the service cannot be reached, and then it names the first package as unknown; here the two are told apart:

    exit 0   every pinned version was looked up, and none has an advisory that audit-exceptions.txt does not explain
    exit 1   advisories: each with its package, and the version that mends it
    exit 2   no service answered: nothing was audited, which is no pass
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVICES = {"pypi": "pypi.org", "osv": "api.osv.dev"}


def exceptions() -> list[str]:
    """Advisories that are explained, a line each: identifier, reason."""
    text = (HERE / "audit-exceptions.txt").read_text(encoding="utf-8")
    return re.findall(r"^([A-Z][A-Za-z0-9-]*) \S", text, re.MULTILINE)


def ask(service: str) -> tuple[list[str], str]:
    """(advisories, why there is no answer)."""
    ignored = [word for advisory in exceptions() for word in ("--ignore-vuln", advisory)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip_audit", "--strict", "--vulnerability-service", service, "--format", "json"),
            *("--requirement", str(HERE.parent / "constraints.txt"), "--no-deps", "--disable-pip", *ignored),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [], (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:160]
    found = [
        f"{package['name']} {package['version']}: {advisory['id']}, mended in {', '.join(advisory['fix_versions']) or 'none'}"
        for package in packages
        for advisory in package.get("vulns", ())
    ]
    return found, ""


def main() -> int:
    silent = []
    for service, host in SERVICES.items():
        found, silence = ask(service)
        if silence:
            silent.append(f"  {host}: {silence}")
            continue
        print("\n".join(found) or f"no known vulnerability in constraints.txt, says {host}")
        return int(bool(found))
    print(
        "nothing was audited: no advisory service could be asked from here\n" + "\n".join(silent) + "\n"
        "  hint:  run `make audit` where one of them can be reached directly, a package mirror is not enough;\n"
        "         or give dist/moepress.cdx.json, which `make sbom` writes, to a scanner with a database of its own",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
