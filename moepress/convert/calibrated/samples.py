"""The calibration set of a recipe and a checkpoint: whose text, and whose tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepress.formats.checkpoint import Checkpoint
from moepress.formats.families import identify_family, text_config
from moepress.recipe import Recipe

if TYPE_CHECKING:
    from moepress.calibration.text import CalibrationSet


def calibration_samples(checkpoint: Checkpoint, recipe: Recipe, *, trust_remote_code: bool = False) -> CalibrationSet:
    """The recipe's calibration text through the checkpoint's own tokenizer, cut into samples.

    Raises:
        PlanRefused: too little text, or none where the recipe says it is.
        CheckpointError: the checkpoint has no tokenizer, or one that is not its own.
    """
    from moepress.calibration.text import default_documents, hub_documents, load_tokenizer, make_samples, read_documents

    wish = recipe.calibration
    family = identify_family(checkpoint.config)
    documents: Any
    if wish.text == "default":
        documents = default_documents()
    elif wish.text.startswith("hub:"):
        documents = hub_documents(wish.text.removeprefix("hub:"))
    else:
        documents = read_documents(Path(wish.text))
    return make_samples(
        documents,
        load_tokenizer(checkpoint.path("config.json").parent, trust_remote_code=trust_remote_code),
        samples=wish.samples,
        length=wish.length,
        seed=wish.seed,
        vocab_size=int(text_config(family, checkpoint.config)["vocab_size"]),
    )
