"""The card's YAML: what the Hub sorts, filters and links by. Facts of ours, and what the source's own card declares.

Licence, languages, tags and datasets are carried over from the source's README.md, which travels as a side file: pressing
changes none of them. The Hub refuses a commit whose card has values it does not know, after every byte was sent; so
everything is checked here against what it takes, and what cannot be right is an error with its field.

    license: modified-mit        is no identifier of the Hub's: other, with license_name and license_link
    datasets: [null]             an error of whoever wrote it: refused there, left out here, and said
    base_model: /models/kimi     a path: only org/name links to a model
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load

from moepress.errors import MoepressError
from moepress.hub.address import parse_address

LICENSES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
    cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
    cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
    cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 h-research intel-research isc lgpl lgpl-2.1
    lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1
    openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
    """.split()  # noqa: SIM905 (a list of a hundred strings says the same on a page)
)
"""Identifiers that the Hub takes for ``license``."""

_CARRIED = ("language", "datasets", "pipeline_tag", "library_name")
_TAG = re.compile(r"[^\x00-\x1f]{1,100}")


def source_metadata(folder: Path) -> dict[str, Any]:
    """What the source's card declares; empty where it has none, or none that can be read."""
    try:
        return dict(metadata_load(folder / "README.md") or {})
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def card_metadata(
    *,
    title: str,
    base_model: str | None,
    source: Mapping[str, Any],
    folder: Path,
    tags: list[str],
    results: list[EvalResult],
) -> tuple[ModelCardData, list[str]]:
    """The YAML, and what was left out or changed of the source's, in words.

    Args:
        title: the model's name.
        base_model: ``org/name`` of the source; None if unknown.
        source: from `source_metadata`.
        folder: the output; looked at for a LICENSE.
        tags: ours; the source's are added.
        results: scores of the pressed model.
    """
    notes: list[str] = []
    licence = _licence(source, folder, base_model, notes)
    carried = {field: _texts(source.get(field), field, notes) for field in _CARRIED}
    theirs = [tag for tag in _list(source.get("tags")) if isinstance(tag, str) and _TAG.fullmatch(tag)]
    data = ModelCardData(
        base_model=base_model,
        library_name=_one(carried["library_name"]) or "transformers",
        pipeline_tag=_one(carried["pipeline_tag"]) or "text-generation",
        language=carried["language"],
        datasets=carried["datasets"],
        tags=[*tags, *(tag for tag in theirs if tag not in tags)],
        eval_results=results or None,
        model_name=title if results else None,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )
    if base_model is not None:
        data["base_model_relation"] = "quantized"
    return data, notes


def check_metadata(data: Mapping[str, Any]) -> None:
    """Holds the YAML against what the Hub takes, without the Hub.

    Args:
        data: as it will stand in the card.

    Raises:
        MoepressError: every field that is wrong, at once.
    """
    problems = []
    licence = data.get("license")
    if licence is not None and licence not in LICENSES:
        problems.append(
            f"license: {licence!r} is no licence identifier of the Hub; use 'other' with license_name and license_link"
        )
    if licence == "other" and not (data.get("license_name") and data.get("license_link")):
        problems.append("license: 'other' needs license_name and license_link")
    for base in _list(data.get("base_model")):
        address = parse_address(base) if isinstance(base, str) else None
        if address is None or address.repo != base:
            problems.append(f"base_model: {base!r} is not org/name of a model on the Hub")
    for field in ("datasets", "tags", "language", "metrics"):
        wrong = [item for item in _list(data.get(field)) if not isinstance(item, str) or not item.strip()]
        if wrong:
            problems.append(f"{field}: {wrong[0]!r} is not a text")
    for entry in data.get("model-index") or ():
        for result in entry.get("results") or ():
            if not (result.get("task") or {}).get("type") or not (result.get("dataset") or {}).get("type"):
                problems.append("model-index: a result without task type or dataset type")
            for metric in result.get("metrics") or ():
                if not isinstance(metric.get("value"), int | float):
                    problems.append(f"model-index: {metric.get('value')!r} is not a number")
    if problems:
        raise MoepressError("the card's metadata cannot be right:\n  " + "\n  ".join(problems), where="README.md")


def _licence(source: Mapping[str, Any], folder: Path, base_model: str | None, notes: list[str]) -> dict[str, str]:
    declared, name, link = (source.get(field) for field in ("license", "license_name", "license_link"))
    if isinstance(declared, list) and len(declared) == 1:
        declared = declared[0]
    if isinstance(declared, str) and declared in LICENSES and declared != "other":
        return {"license": declared}
    files = sorted(path.name for path in folder.glob("LICEN[CS]E*") if path.is_file())
    if isinstance(declared, str) and declared != "other":
        notes.append(f"license {declared!r} is no licence identifier of the Hub: written as 'other' with that name")
        name = name or declared
    if not files and not declared and not name:
        notes.append("the source declares no licence, and brings no LICENSE file")
        return {}
    if not declared and not name:
        notes.append("the source declares no licence in its card; its LICENSE file is linked")
    if not isinstance(link, str) or not link:
        link = files[0] if files else f"https://huggingface.co/{base_model or ''}"
    return {"license": "other", "license_name": str(name or "license-of-the-source"), "license_link": link}


def _texts(value: Any, field: str, notes: list[str]) -> list[str] | None:
    items = _list(value)
    good = [item for item in items if isinstance(item, str) and item.strip()]
    if len(good) != len(items):
        notes.append(f"{field}: {len(items) - len(good)} entries of the source's card are not text and were left out")
    return good or None


def _one(values: list[str] | None) -> str | None:
    return values[0] if values else None


def _list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
