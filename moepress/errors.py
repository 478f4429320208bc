"""Every error a user can meet: one tree, one shape.

An error says what is wrong, where, with the numbers, and the next command:

    model-00002-of-000003.safetensors: 100 bytes short
      where: /data/kimi/model-00002-of-000003.safetensors (has 4,999,819,236 bytes, its header needs 4,999,819,336)
      hint:  download this shard again: moepress pull moonshotai/Kimi-K2-Instruct /data/kimi

The exit code belongs to the class: 1 means "the thing you asked about is not as it should be" (a failed check, a failed
gate), 2 means "it could not be done" (bad input, a full disk, a refused plan).
"""

from __future__ import annotations

from collections.abc import Sequence


class MoepressError(Exception):
    """Base of every error moepress raises on purpose.

    Args:
        what: one sentence, the fact that is wrong, with its numbers.
        where: the file, tensor, field or option it is about.
        hint: what to do next, best a command that can be pasted; without one the kind's usual hint is shown.
    """

    exit_code = 2
    usual_hint = "the command's --help says what each option takes; moepress doctor looks at this machine"

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        lines.append(f"  hint:  {self.hint or self.usual_hint}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """The same facts for ``--json``."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "hint": self.hint or self.usual_hint,
        }


class FormatError(MoepressError):
    """Bytes that are not what their format says: headers, shards, indexes, scales, packed words."""

    usual_hint = "download the file again and compare its SHA-256 with the publisher's; if moepress wrote it, that is a bug of ours"


class CheckpointError(MoepressError):
    """A checkpoint as a whole is incomplete, contradictory, or of a kind we do not know."""

    usual_hint = (
        "compare the folder with the publisher's: moepress pull ID DIR checks every file, and fetches what differs"
    )


class RecipeError(MoepressError):
    """A recipe that does not say a possible thing. Lists every problem at once.

    Args:
        problems: (field path, message) pairs, in the recipe's order.
    """

    usual_hint = "moepress recipes show NAME prints a whole recipe, moepress recipes schema its JSON schema"

    def __init__(
        self, problems: Sequence[tuple[str, str]], *, where: str | None = None, hint: str | None = None
    ) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the recipe"
        super().__init__(
            "\n".join([head] + [f"  {path}: {message}" for path, message in self.problems]), where=where, hint=hint
        )

    def as_json(self) -> dict[str, object]:
        return {
            **super().as_json(),
            "problems": [{"field": path, "message": message} for path, message in self.problems],
        }


class PlanRefused(MoepressError):
    """The plan cannot work: refused before anything is read or written."""

    usual_hint = "change that, then ask again without any work: moepress plan SRC --recipe NAME"


class QuantizeError(MoepressError):
    """A tensor that cannot be quantized: NaN or inf in the source, an impossible shape."""

    usual_hint = (
        "moepress inspect SRC shows what the source holds; then run the command again with another source or recipe"
    )


class ConvertError(MoepressError):
    """A conversion stopped. What was finished stays; the message says how to resume."""

    usual_hint = "run the same command again: finished shards are kept"


class VerifyFailed(MoepressError):
    """The output was checked and is not right."""

    usual_hint = "moepress verify OUT --source SRC lists everything that is off"

    exit_code = 1


class ServingError(MoepressError):
    """The server could not be started, died, or did not answer. Says the cause that its log gives."""

    usual_hint = "the server's log says more; moepress doctor looks at its environment"


class HubError(MoepressError):
    """The Hub refused, could not be reached, or sent what is not what it announced. What arrived whole stays."""

    usual_hint = "run the same command again: what arrived whole is kept"


class EvaluateError(MoepressError):
    """An evaluation could not be done: a server that does not answer, data that is not there, a sandbox that does not hold."""

    usual_hint = "run the same command again: answers that were given are kept"


class ServerDied(ServingError):
    """The server ended, while it started or while it was asked.

    Args:
        cause: what kind of thing went wrong (`serving.death.Cause`), or None where the log shows no cause.
    """

    def __init__(self, what: str, *, cause: str | None, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.cause = cause

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "cause": self.cause}
