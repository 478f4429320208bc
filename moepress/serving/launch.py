"""The command that starts a server: flags from the checkpoint, the recipe and the runtime contract, in one place.

The same `Launch` is run by `serving.sglang.start` and printed by `moepress serve --print`, so what is validated is what
users are told to run. Flags that keep a pressed checkpoint from being misread are always there:

    --disable-shared-experts-fusion   a shared expert kept in FP8 or BF16 is else renamed into an INT4 slot (GLM-4.x: by
                                      default on every NVIDIA GPU) and dropped without a word
    --host 127.0.0.1                  nothing is reachable from outside unless asked for
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moepress.errors import ServingError

CPU_LAB = Path(__file__).parent / "cpu_lab" / "site"
CPU_LAB_VERSION = "0.5.23"

_CPU_LAB_FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled"),
    *("--watchdog-timeout", "3600"),  # 300 s end a server that a busy machine merely keeps waiting
)
_CPU_LAB_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    # One thread: with tiny models a second one waits more than it works, and on a busy machine all the time.
    "OMP_NUM_THREADS": "1",
    # Half a minute of g++ in the first forward, many minutes on a busy machine, to make tiny models no faster.
    "TORCH_COMPILE_DISABLE": "1",
    "SGLANG_WARMUP_TIMEOUT": "3600",
}
_CPU_LAB_TOKENS = 20_000  # without a limit SGLang takes most of the machine's memory


@dataclass(frozen=True)
class Launch:
    """A server's command.

    Attributes:
        command: argument vector, the interpreter first.
        variables: environment variables to set on top of the caller's.
        url: where it will answer.
    """

    command: tuple[str, ...]
    url: str
    variables: dict[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """The command as it can be pasted into a shell, one flag a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        lines = [" ".join([*words, *map(shlex.quote, self.command[:3])])]
        for word in self.command[3:]:
            if word.startswith("--"):
                lines.append(f"  {word}")
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)


@dataclass(frozen=True)
class ServeOptions:
    """What a user may choose; None = SGLang's own default.

    Attributes:
        tensor_parallel: GPUs that share the model.
        kv_cache_dtype: ``auto``, ``bfloat16``, ``fp8_e4m3``.
        attention_backend: SGLang's name.
        page_size: tokens per KV page.
        mem_fraction_static: share of GPU memory for weights and KV pool.
        max_total_tokens: upper limit of the KV pool, in tokens.
        context_length: longest request, in tokens.
        mtp: speculate with the checkpoint's own MTP layer.
        trust_remote_code: let the checkpoint's Python files run.
        tokenizer: False = speak in token ids only.
        extra: flags passed on as they are, last.
    """

    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    page_size: int | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    mtp: bool = False
    trust_remote_code: bool = False
    tokenizer: bool = True
    extra: Sequence[str] = ()


def sglang_launch(
    python: Path | str,
    model: Path | str,
    *,
    port: int,
    options: ServeOptions | None = None,
    contract_flags: Sequence[str] = (),
    host: str = "127.0.0.1",
    cpu_lab: bool = False,
    plugins: Sequence[Path] = (),
) -> Launch:
    """The command for one server.

    Args:
        python: interpreter of the SGLang environment (or a launcher that takes ``-m sglang.launch_server`` and flags).
        model: checkpoint folder.
        port: TCP port.
        options: the user's choices.
        contract_flags: flags that the runtime contract asks for with this checkpoint; a choice in `options` wins.
        host: address to listen on.
        cpu_lab: run on this machine's CPU with `cpu_lab`'s kernels.
        plugins: folders with SGLang plug-ins, put on PYTHONPATH.

    Raises:
        ServingError: options that exclude each other.
    """
    options = options or ServeOptions()
    if cpu_lab and options.tensor_parallel != 1:
        raise ServingError(
            "the CPU lab runs one rank only", where=f"tensor_parallel={options.tensor_parallel}", hint="leave --tp out"
        )
    flags = [
        *("--model-path", str(model)),
        *("--host", host),
        *("--port", str(port)),
        "--disable-shared-experts-fusion",
    ]
    chosen: dict[str, str | None] = {
        "--tp-size": str(options.tensor_parallel) if options.tensor_parallel != 1 else None,
        "--kv-cache-dtype": options.kv_cache_dtype if options.kv_cache_dtype != "auto" else None,
        "--attention-backend": options.attention_backend,
        "--page-size": _text(options.page_size),
        "--mem-fraction-static": _text(options.mem_fraction_static),
        "--max-total-tokens": _text(options.max_total_tokens or (_CPU_LAB_TOKENS if cpu_lab else None)),
        "--context-length": _text(options.context_length),
    }
    for name, value in chosen.items():
        if value is not None and not (cpu_lab and name == "--attention-backend"):
            flags += [name, value]
    if options.mtp:
        flags += ["--speculative-algorithm", "EAGLE"]
    if options.trust_remote_code:
        flags.append("--trust-remote-code")
    if not options.tokenizer:
        flags.append("--skip-tokenizer-init")
    if cpu_lab:
        flags += _CPU_LAB_FLAGS
    flags += _missing(contract_flags, flags)
    flags += options.extra

    folders = [*([CPU_LAB] if cpu_lab else []), *plugins]
    variables = dict(_CPU_LAB_VARIABLES) if cpu_lab else {}
    if folders:
        variables["PYTHONPATH"] = ":".join(map(str, folders))
    return Launch((str(python), "-m", "sglang.launch_server", *flags), f"http://{host}:{port}", variables)


def _text(value: float | None) -> str | None:
    return None if value is None else str(value)


def _missing(wanted: Sequence[str], present: Sequence[str]) -> list[str]:
    """The flags of `wanted`, with their values, that `present` does not name."""
    kept: list[str] = []
    take = False
    for word in wanted:
        if word.startswith("--"):
            take = word not in present
        if take:
            kept.append(word)
    return kept
