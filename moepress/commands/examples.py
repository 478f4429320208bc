"""What stands below the options in ``--help``: a few commands to start from, each with what it is for.

A test parses every one of them, and the command reference of the docs shows them too.
"""

from __future__ import annotations

EXIT_CODES: dict[int, str] = {
    0: "done, and as it should be",
    1: "checked and not as it should be: a failed verification or gate, a limit of the recipe exceeded",
    2: "could not be done: bad input, a full disk, a refused plan; the message says what to do next",
    130: "stopped by Ctrl-C or SIGTERM; the same command resumes",
    141: "the program that read the output closed the pipe",
}

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "doctor": (
        ("moepress doctor", "this machine, and the disk of the current folder"),
        ("moepress doctor --folder /models --json", "the disk that outputs will go to, for a script"),
    ),
    "inspect": (
        ("moepress inspect /models/Kimi-K2-Instruct", "a folder"),
        ("moepress inspect moonshotai/Kimi-K2-Instruct@main", "the Hub: headers only, a few MB"),
    ),
    "plan": (
        ("moepress plan /models/Kimi-K2-Instruct /models/Kimi-K2-INT4 --recipe kimi-k2", "before any work"),
        (
            "moepress plan config.json --recipe glm-5 --on h200 --on h200x8",
            "sizes, and times on paper, from the configuration alone",
        ),
        (
            "moepress plan /models/Kimi-K2-Instruct -r kimi-k2 --set weights.algorithm=gptq --set serving.tensor_parallel=4",
            "another algorithm, another number of GPUs",
        ),
    ),
    "pull": (
        ("moepress pull moonshotai/Kimi-K2-Instruct /models/Kimi-K2-Instruct", "every file checked; resumes"),
        ("moepress pull zai-org/GLM-5.2-FP8@main /models/GLM-5.2-FP8 --workers 8", "a revision, eight files at once"),
    ),
    "convert": (
        ("moepress convert /models/Kimi-K2-Instruct /models/Kimi-K2-INT4 --recipe kimi-k2", "rounding; no GPU needed"),
        (
            "moepress convert /models/Kimi-K2-Instruct /models/Kimi-K2-INT4 -r kimi-k2 --set weights.algorithm=gptq --device cuda",
            "GPTQ on a GPU",
        ),
        (
            "moepress convert moonshotai/Kimi-K2-Instruct /models/Kimi-K2-INT4 -r kimi-k2 --stream --delete-source",
            "from the Hub, with room for the result and a few shards only",
        ),
        (
            "moepress convert /models/GLM-5.2-FP8 /models/GLM-5.2-INT4 -r glm-5 --workers 8",
            "eight processes on this machine",
        ),
    ),
    "verify": (
        ("moepress verify /models/Kimi-K2-INT4 --source /models/Kimi-K2-Instruct", "every tensor against its source"),
        ("moepress verify /models/Kimi-K2-INT4", "when the source is gone: the output by itself"),
    ),
    "fidelity": (
        (
            "moepress fidelity /models/Kimi-K2-INT4 --source /models/Kimi-K2-Instruct --text held-out.jsonl --picture errors.svg",
            "KL divergence on your text, and where the error enters",
        ),
    ),
    "validate": (
        ("moepress validate /models/Kimi-K2-INT4 --baseline /models/Kimi-K2-Instruct", "both on this machine's GPUs"),
        ("moepress validate ./tiny-int4 --baseline ./tiny-fp8 --cpu-lab", "a small model, on a machine without a GPU"),
    ),
    "evaluate": (
        ("moepress evaluate /models/Kimi-K2-INT4 --baseline /models/Kimi-K2-Instruct", "everything that ships"),
        (
            "moepress evaluate /models/Kimi-K2-INT4 --baseline /models/Kimi-K2-Instruct --tasks gsm8k",
            "with a task from lm-eval",
        ),
    ),
    "serve": (
        ("moepress serve /models/Kimi-K2-INT4 --print", "the launch command, to run elsewhere"),
        ("moepress serve /models/Kimi-K2-INT4", "run it here"),
    ),
    "report": (("moepress report /models/Kimi-K2-INT4", "one HTML page beside the output"),),
    "sign": (
        ("moepress sign /models/Kimi-K2-INT4 --key press.pem", "model.sig beside the weights"),
        ("moepress verify /models/Kimi-K2-INT4 --signed-by press.pem.pub", "for whoever receives a copy"),
    ),
    "card": (("moepress card /models/Kimi-K2-INT4", "the model card as it would be published"),),
    "publish": (
        (
            "moepress publish /models/Kimi-K2-INT4 ORG/Kimi-K2-INT4 --dry-run",
            "what would be sent, and what would prevent it",
        ),
        ("moepress publish /models/Kimi-K2-INT4 ORG/Kimi-K2-INT4", "upload, check, merge"),
    ),
    "run": (
        (
            "moepress run kimi-k2 --source moonshotai/Kimi-K2-Instruct --to ORG/Kimi-K2-INT4",
            "from Hub to Hub, up to the first gate that fails",
        ),
    ),
    "recipes": (
        ("moepress recipes list", "the recipes that ship"),
        ("moepress recipes show kimi-k2 --set weights.group_size=64", "every field, with defaults"),
        ("moepress recipes check my-recipe.yaml", "all problems in your own file"),
    ),
    "cluster": (("moepress cluster slurm --help", "job files for Slurm, and for Kubernetes with kuberay"),),
}


def epilog(name: str) -> str | None:
    """The examples of a command, for ``--help``; None where there are none."""
    found = EXAMPLES.get(name, ())
    if not found:
        return None
    return "\n".join(["[bold]Examples[/bold]", *(f"\n  [dim]# {what}[/dim]\n  {line}" for line, what in found)])


def exit_codes() -> str:
    """The table of exit codes, for ``moepress --help``."""
    return "\n".join(["[bold]Exit codes[/bold]", *(f"  {code:<4} {what}" for code, what in EXIT_CODES.items())])
