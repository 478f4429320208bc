"""The model card: facts into the template, and the YAML on top. What is not known is a sentence, never a gap."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from huggingface_hub import ModelCard

from moepress.publish.facts import CardFacts, gather, gibibytes, scores
from moepress.publish.metadata import card_metadata, check_metadata, source_metadata
from moepress.report.gates import figure_text
from moepress.report.output import PressedOutput


@dataclass(frozen=True)
class Card:
    """A card that the Hub will take. ``notes``: what could not be carried over, in words."""

    text: str
    facts: CardFacts
    metadata: dict[str, Any]
    notes: tuple[str, ...]


def make_card(output: PressedOutput, *, title: str | None = None, base_model: str | None = None) -> Card:
    """The card of one output.

    Args:
        title: the model's name, as on the Hub; the folder's by default.
        base_model: ``org/name`` of the source, where it is not recorded.

    Raises:
        MoepressError: metadata that the Hub would refuse.
    """
    facts = gather(output, title=title, base_model=base_model)
    data, notes = card_metadata(
        title=facts.title,
        base_model=facts.origin.repo,
        source=source_metadata(output.folder),
        folder=output.folder,
        tags=facts.tags,
        results=scores(facts),
    )
    metadata: dict[str, Any] = data.to_dict()  # type: ignore[no-untyped-call]
    check_metadata(metadata)
    if facts.origin.repo is None:
        notes.append(
            "the source's name on the Hub is not known, so the card links no base model: --base-model org/name"
        )
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(facts, metadata)}")
    return Card(str(card).rstrip("\n") + "\n", facts, metadata, tuple(notes))


def _text(facts: CardFacts, metadata: dict[str, Any]) -> str:
    import jinja2

    template = (resources.files("moepress.publish") / "card.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(  # Markdown, not HTML: `cell` escapes what a table cell cannot hold
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "size": gibibytes,
        "figure": figure_text,
        "cell": lambda text: str(text).replace("|", "\\|").replace("\n", " "),
        "percent": lambda share: "–" if share is None else f"{share:.2%}",
        "score": lambda value: "–" if value is None else f"{value:.4f}",
        "interval": lambda pair: f"{pair[0]:+.4f} to {pair[1]:+.4f}" if pair else "–",
        "signed": lambda value: f"{value:+.4f}",
    }
    text = environment.from_string(template).render(card=facts, metadata=metadata)
    return re.sub(r"\n{3,}", "\n\n", text)  # what was left out of the template leaves empty lines
