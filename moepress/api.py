"""moepress from Python: the functions that the commands of the same names call.

    from moepress import api

    recipe = api.load_recipe("kimi-k2", ["weights.group_size=64"])
    print(api.plan("/models/Kimi-K2-Instruct", recipe).pressed.bytes)
    api.convert("/models/Kimi-K2-Instruct", "/models/Kimi-K2-INT4", recipe)
    assert not api.verify("/models/Kimi-K2-INT4", "/models/Kimi-K2-Instruct").problems

Everything that can go wrong is a `MoepressError`: what is wrong, where, and what to do next. A function prints nothing;
who wants to see progress gives a watcher. Ctrl-C may come at any moment, and the same call resumes.

Heavy libraries are imported by the call that needs them, so importing this module costs nothing. (The functions cannot
be reached as ``moepress.convert`` and so on: those names are the packages that hold the code.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moepress.convert.arrivals import Arrivals
    from moepress.convert.executor import Place
    from moepress.convert.forecast.outlook import Outlook
    from moepress.convert.run import Conversion
    from moepress.convert.watcher import Watcher
    from moepress.evaluate.answers import Watcher as CountWatcher
    from moepress.evaluate.fidelity import Fidelity
    from moepress.formats.inspection import Inspection
    from moepress.hub.pulling import Pulled
    from moepress.hub.pulling import Watcher as PullWatcher
    from moepress.recipe import Recipe
    from moepress.verify.run import Verification
    from moepress.verify.run import Watcher as VerifyWatcher

__all__ = ["convert", "fidelity", "inspect", "load_recipe", "plan", "pull", "shipped_recipes", "verify"]


def shipped_recipes() -> list[str]:
    """Names of the recipes that ship with moepress, sorted."""
    from moepress import recipe

    return recipe.shipped_recipes()


def load_recipe(recipe: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe, checked whole.

    Args:
        recipe: a shipped recipe's name, or a YAML file.
        overrides: ``field=value`` each, as after ``--set``.

    Returns:
        The recipe: strict, frozen, every default in it.

    Raises:
        RecipeError: with every problem at once, each under its field.
    """
    from moepress import recipe as recipes

    return recipes.load_recipe(str(recipe), overrides)


def inspect(source: str | Path, *, tell: Callable[[str], None] | None = None) -> Inspection:
    """What a checkpoint holds: components, formats, parameters, bytes. Reads headers only.

    Args:
        source: a folder, or ``org/name[@revision]`` on the Hub.
        tell: told about waiting and retries, where the Hub is asked.

    Returns:
        ``rows`` (component, stored_as, weights, parameters, bytes), ``family``, ``bytes``, ``parameters``, ``warnings``.

    Raises:
        CheckpointError, FormatError: it is incomplete or damaged.
        HubError: it cannot be reached.
    """
    from moepress.formats.inspection import inspect_checkpoint
    from moepress.hub.opening import open_source

    return inspect_checkpoint(open_source(source, tell=tell))


def plan(
    source: str | Path,
    recipe: Recipe | str,
    out: str | Path | None = None,
    *,
    gpu_memory: int | str = "141GB",
    memory_fraction: float = 0.88,
    kv_dtype: str = "fp8",
    threads: int | None = None,
    trust_remote_code: bool = False,
    machines: Sequence[str] = (),
    same_kv_as: str | Path | None = None,
) -> Outlook:
    """What a conversion would need and give. Writes nothing.

    Args:
        source: a checkpoint folder, ``org/name[@revision]``, or a ``config.json`` alone.
        recipe: from `load_recipe`, or a shipped recipe's name.
        out: where the output would go; its disk is looked at.
        gpu_memory: of one GPU, bytes or for example ``"141GB"``.
        memory_fraction: share of it for weights and KV cache (SGLang: ``--mem-fraction-static``).
        kv_dtype: ``"fp8"`` or ``"bf16"``.
        threads: that the conversion would press with; all processors by default.
        trust_remote_code: run the checkpoint's own Python code for its tokenizer, where the recipe calibrates.
        machines: machines that are not here, to estimate the time for on paper: ``"h200x8"`` …
        same_kv_as: another output of this model, whose KV scales would be taken over.

    Returns:
        ``source`` and ``pressed`` (bytes, weights_per_gpu, kv_tokens each), ``disk``, ``time``, ``paper``, ``warnings``.

    Raises:
        CheckpointError, FormatError, PlanRefused: whatever would stop the conversion.
    """
    from moepress.convert.forecast.outlook import outlook
    from moepress.recipe import parse_size

    return outlook(
        str(source),
        _recipe(recipe),
        None if out is None else Path(out),
        gpu_bytes=parse_size(gpu_memory),
        memory_fraction=memory_fraction,
        kv_dtype=kv_dtype,
        threads=threads,
        trust_remote_code=trust_remote_code,
        machines=machines,
        same_kv_as=same_kv_as,
    )


def convert(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | str,
    *,
    threads: int | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    same_kv_as: str | Path | None = None,
    watcher: Watcher | None = None,
    place: Place | None = None,
    arrivals: Arrivals | None = None,
) -> Conversion:
    """Presses a checkpoint. Stopped at any moment, the same call resumes, and gives the same bytes.

    A calibrated conversion gives the command line's own bytes when ``MKL_CBWR=AUTO,STRICT`` is in the environment before
    torch is imported, as the command line sees to.

    Args:
        source: a local checkpoint folder.
        out: a new or empty folder, or one that this conversion was begun in.
        recipe: from `load_recipe`, or a shipped recipe's name.
        threads: for pressing and calibration; all processors by default. Changes no byte.
        device: where layers and calibrated experts are computed: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        trust_remote_code: run the checkpoint's own Python code for its tokenizer; only calibration needs one.
        same_kv_as: another output of this model, whose KV scales are taken over instead of measuring any.
        watcher: told about progress (`convert.watcher.Watcher`).
        place: where the work is done, for example `cluster.ray_executor.ray_workers`; this process by default.
        arrivals: the source is still arriving from the Hub (`convert.streaming.StreamedSource`).

    Returns:
        ``report`` (what ``moepress_report.json`` holds), ``plan``, ``out``, ``seconds``, ``resumed``.

    Raises:
        CheckpointError, FormatError: the source is incomplete or damaged.
        PlanRefused: it cannot work, found before any work.
        QuantizeError, ConvertError: it stopped on the way; what was finished stays.
    """
    from moepress.convert import run

    return run.convert(
        source,
        Path(out),
        _recipe(recipe),
        threads=threads,
        trust_remote_code=trust_remote_code,
        watcher=watcher,
        place=place,
        arrivals=arrivals,
        device=device,
        same_kv_as=same_kv_as,
    )


def verify(
    out: str | Path,
    source: str | Path | None = None,
    *,
    same_kv_as: str | Path | None = None,
    threads: int | None = None,
    watcher: VerifyWatcher | None = None,
) -> Verification:
    """Re-reads an output with the safetensors library and compressed-tensors, and compares every tensor with the source.

    Args:
        out: a converted checkpoint.
        source: what it was made from; without it only the output's own consistency is checked.
        same_kv_as: the other side of a prefill/decode pair, whose KV scales must be its own.
        threads: that tensors are compared with; all processors by default.
        watcher: told about bytes.

    Returns:
        ``problems`` (empty: verified) and ``checked``, in words; ``tensors``, ``bytes``, ``seconds``.

    Raises:
        CheckpointError, FormatError: one of the two cannot be read at all, or they are two models.
    """
    from moepress.verify import run

    return run.verify(Path(out), source, same_kv_as=same_kv_as, threads=threads, watcher=watcher)


def fidelity(
    out: str | Path,
    source: str | Path,
    texts: Mapping[str, Path] | None = None,
    *,
    samples: int | None = None,
    length: int = 512,
    memory: int | str = "4GiB",
    trust_remote_code: bool = False,
    watcher: CountWatcher | None = None,
) -> Fidelity:
    """What pressing cost on held-out text, layer by layer, with nothing but the two folders: no server, any size.

    Args:
        out: a converted checkpoint.
        source: what it was made from.
        texts: a name -> a .txt or .jsonl file that nobody calibrated on; by default four small ones that ship for this
            (prose, code, chat, tool calls).
        samples: of each text; by default 32 of a file, 12 of a text that ships.
        length: tokens a sample.
        memory: for activations, and again for experts in work: bytes or for example ``"4GiB"``.
        trust_remote_code: run the checkpoint's own Python code for its tokenizer.
        watcher: told about layers.

    Returns:
        ``texts`` (a name -> KL divergence in nats a token, agreement, perplexities) and ``drift`` after each layer.

    Raises:
        CheckpointError, FormatError: one of the two cannot be run, or they are two models.
    """
    from moepress.evaluate.fidelity import measure_fidelity
    from moepress.recipe import parse_size

    return measure_fidelity(
        Path(out),
        Path(source),
        texts,
        samples=samples,
        length=length,
        memory=parse_size(memory),
        trust_remote_code=trust_remote_code,
        watcher=watcher,
    )


def pull(
    repo: str,
    folder: str | Path,
    *,
    workers: int = 4,
    watcher: PullWatcher | None = None,
    tell: Callable[[str], None] | None = None,
) -> Pulled:
    """Fetches a checkpoint from the Hub: one commit, every file held against the Hub's checksums. The same call resumes.

    Args:
        repo: ``org/name``, or ``org/name@revision``.
        folder: new, empty, or one that holds parts of this checkpoint.
        workers: files at once.
        watcher: told about bytes.
        tell: told about waiting and retries.

    Returns:
        ``fetched``, ``kept`` and ``left`` (names of files), ``snapshot`` (repository and commit), ``seconds``.

    Raises:
        HubError: no such repository, no access, too little disk, bytes that stay wrong.
    """
    from moepress.errors import HubError
    from moepress.hub import pulling
    from moepress.hub.address import parse_address
    from moepress.hub.reading import open_hub_checkpoint

    address = parse_address(repo)
    if address is None:
        raise HubError(
            f"{repo!r} is not a repository's name", hint="write org/name, or org/name@revision for a branch or commit"
        )
    checkpoint, snapshot = open_hub_checkpoint(address, tell=tell)
    return pulling.pull(checkpoint, snapshot, Path(folder), workers=workers, watcher=watcher)


def _recipe(recipe: Recipe | str) -> Recipe:
    return load_recipe(recipe) if isinstance(recipe, str) else recipe
