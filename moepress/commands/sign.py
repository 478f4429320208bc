"""``moepress sign``: a signature over an output's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moepress.commands.console import next_step, quoted, stdout
from moepress.commands.options import AsJson, print_json
from moepress.errors import MoepressError


def sign(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Private elliptic-curve key (PEM).")],
    password_env: Annotated[
        str | None,
        typer.Option("--key-password-env", metavar="NAME", help="Environment variable that holds the key's password."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sign every file that convert wrote into OUT with your key; publish uploads the signature too."""
    from moepress.publish.signing import sign_output

    password = None if password_env is None else os.environ.get(password_env)
    if password_env is not None and password is None:
        raise MoepressError(
            f"the variable {password_env} is not set",
            where="--key-password-env",
            hint=f"read -rs {password_env}, then export it",
        )
    signature = sign_output(out, key, password=password)
    if as_json:
        print_json({"signature": str(signature)})
        return
    stdout.print(f"{signature}: signed", soft_wrap=True)
    next_step(quoted("moepress", "verify", out, "--signed-by", f"{key}.pub"))
