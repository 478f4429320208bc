"""Source and pressed model side by side over held-out text, one layer of each in memory.

    after every layer:   drift = ‖h̃ − h‖ / ‖h‖     over all tokens: where the error enters, and whether it grows
    at the end:          KL(source ‖ pressed), agreement of the most likely token, perplexity of both

The map of errors per layer and expert comes from the receipts: ‖W − Ŵ‖ / ‖W‖ of each matrix, as it was quantized.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moepress.calibration.activations import Scratch
from moepress.calibration.checkpoint_weights import CheckpointWeights
from moepress.calibration.divergence import Divergence, compare_streams
from moepress.calibration.run_settings import RunSettings
from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import StreamedModel
from moepress.calibration.text import Document, Tokenizer, load_tokenizer, make_samples
from moepress.convert.layout import PROJECTIONS
from moepress.convert.made_from import refuse_two_models
from moepress.convert.receipts import expert_errors, weight_records
from moepress.evaluate.texts import domain_documents
from moepress.formats.checkpoint import open_checkpoint
from moepress.formats.families import identify_family, text_config

SAMPLES = {"files": 32, "shipped": 12}
"""Samples of each text, where nobody says how many: a shipped domain holds some ten thousand tokens."""


PICTURES = (".svg", ".png", ".pdf")
"""Endings of a picture's file."""


@dataclass(frozen=True)
class Fidelity:
    """What was measured.

    Attributes:
        texts: per text, the comparison of next-token distributions.
        samples, length: of each text, and the tokens of one.
        drift: relative error of the hidden states after each layer, over all texts.
        experts: per layer and projection, relative error of every expert; empty without receipts.
    """

    texts: dict[str, Divergence]
    samples: int
    length: int
    drift: list[float]
    experts: dict[int, dict[str, list[float]]]

    def as_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "length": self.length,
            "texts": {name: asdict(divergence) for name, divergence in self.texts.items()},
            "drift": self.drift,
            "experts": {str(layer): errors for layer, errors in self.experts.items()},
        }


def measure_fidelity(
    out: Path,
    source: Path,
    files: Mapping[str, Path] | None = None,
    *,
    samples: int | None = None,
    length: int = 512,
    seed: int = 1,
    memory: int = 4 << 30,
    trust_remote_code: bool = False,
    watcher: Any = None,
) -> Fidelity:
    """Compares a pressed checkpoint with its source.

    Args:
        out, source: checkpoint folders of one model.
        files: name → .txt or .jsonl; without any, the domains that ship for evaluation, none of which is in the text
            that ships for calibration. Those made of conversations are left out where the model has no chat template.
        samples, length: N and S of each text; None takes `SAMPLES`.
        memory: bytes for activations, and again for a block of experts; more go to scratch files.

    Raises:
        CheckpointError, PlanRefused: unusable checkpoints or too little text.
        VerifyFailed: logits that are not finite.
    """
    mine, theirs = open_checkpoint(out), open_checkpoint(source)
    refuse_two_models(mine, theirs, option="--source")
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    vocabulary = int(text_config(identify_family(theirs.config), theirs.config)["vocab_size"])
    count = samples or SAMPLES["files" if files else "shipped"]
    ids = {
        name: make_samples(
            documents, tokenizer, samples=count, length=length, seed=seed, vocab_size=vocabulary
        ).token_ids
        for name, documents in _texts(files, tokenizer).items()
    }
    token_ids = torch.cat(list(ids.values()))
    settings = RunSettings(expert_bytes=memory)
    with (
        tempfile.TemporaryDirectory(prefix="moepress-") as folder,
        Scratch(Path(folder), memory_bytes=memory) as scratch,
        CheckpointWeights(mine) as my_weights,
        CheckpointWeights(theirs) as their_weights,
    ):
        pressed = StreamedModel(theirs.config, my_weights, scratch, settings)
        original = StreamedModel(theirs.config, their_weights, scratch, settings)
        p, q = original.embed(token_ids), pressed.embed(token_ids)
        drift = []
        if watcher is not None:
            watcher.start("comparing", original.num_layers)
        for index in range(original.num_layers):
            original.run_layer(index, p)
            pressed.run_layer(index, q)
            drift.append(_drift(p, q))
            if watcher is not None:
                watcher.add(1)
        original.finish(p)
        pressed.finish(q)
        heads = original.head(), pressed.head()
        found, first = {}, 0
        for name, part in ids.items():
            rows = slice(first, first + len(part))
            found[name] = compare_streams(heads[0], _part(p, rows, scratch), heads[1], _part(q, rows, scratch), part)
            first += len(part)
    errors = expert_errors(weight_records(out), identify_family(theirs.config), theirs.config)
    return Fidelity(found, count, length, drift, errors)


def _texts(files: Mapping[str, Path] | None, tokenizer: Tokenizer) -> dict[str, list[Document]]:
    documents = domain_documents(files)
    if files or getattr(tokenizer, "chat_template", None):
        return documents
    return {name: some for name, some in documents.items() if all(document.text is not None for document in some)}


def draw(result: Fidelity, path: Path) -> None:
    """A picture: error of every expert by layer, one panel per projection, and the drift of the hidden states below.

    Args:
        path: ends in one of `PICTURES`; its folder must exist.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    layers = sorted(result.experts)
    panels = [p for p in PROJECTIONS if any(p in result.experts[layer] for layer in layers)]
    figure, axes = plt.subplots(
        2 if panels else 1,
        max(1, len(panels)),
        figsize=(4.2 * max(1, len(panels)), 3.2 + 0.18 * max(8, len(layers))),
        squeeze=False,
        layout="constrained",
    )
    if panels:
        rows = {p: [result.experts[layer].get(p, []) for layer in layers] for p in panels}
        top = max(max(row, default=0) for p in panels for row in rows[p])
        low = min(min(row, default=0) for p in panels for row in rows[p])
        for axis, projection in zip(axes[0], panels, strict=True):
            image = axis.imshow(
                rows[projection], aspect="auto", cmap="viridis", vmin=low, vmax=top, interpolation="nearest"
            )
            axis.set_title(projection, fontsize=10)
            axis.set_xlabel("expert")
            axis.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=8)
        axes[0][0].set_ylabel("layer")
        figure.colorbar(image, ax=list(axes[0]), label="relative error", shrink=0.9)
    for spare in axes[-1][1:]:
        spare.remove()
    grid = figure.add_subplot(axes[-1][0].get_gridspec()[-1, :]) if panels else axes[-1][0]
    if panels:
        axes[-1][0].remove()
    grid.plot(range(len(result.drift)), result.drift, marker="o", markersize=3, color="#33658a")
    grid.set_xlabel("after layer")
    grid.set_ylabel("drift of hidden states")
    grid.set_ylim(bottom=0)
    grid.xaxis.get_major_locator().set_params(integer=True)
    grid.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(figure)


def _drift(p: Stream, q: Stream) -> float:
    error = energy = 0.0
    for sample in range(len(p.hidden)):
        real = p.hidden.read(sample, sample + 1).double()
        error += float((q.hidden.read(sample, sample + 1).double() - real).square().sum())
        energy += float(real.square().sum())
    return (error / energy) ** 0.5 if energy else 0.0


def _part(stream: Stream, rows: slice, scratch: Scratch) -> Stream:
    """Some samples of a finished stream, as a stream of their own."""
    hidden = scratch.allocate((rows.stop - rows.start, *stream.hidden.shape[1:]), stream.hidden.dtype)
    for sample in range(rows.start, rows.stop):
        hidden.write(sample - rows.start, stream.hidden.read(sample, sample + 1))
    return Stream(hidden, stream.lengths[rows])
