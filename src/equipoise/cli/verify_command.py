"""``equipoise verify`` and ``sign``: statements that others can rely on."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise._rounding import rounded_up
from equipoise._say import wrapped
from equipoise.app.run_checks import is_federation
from equipoise.cli.screen import answer, emit, loading, open_console, quiet
from equipoise.cli.shared_options import (
    OF_CLIENTS,
    Json,
    LedgerFile,
    RunArgument,
    RunDir,
    UsageError,
    chosen_folder,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


Password = Annotated[
    str | None,
    typer.Option("--password-file", help="File with the password of the key, or env:NAME.", metavar="FILE"),
]


def verify(
    run: RunArgument = None,
    ledger: LedgerFile = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="The issuer's public key; the run must be signed with it. A file may hold several, old and "
            "new. env:NAME takes an environment variable.",
            metavar="FILE",
        ),
    ] = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Compute the privacy of a run again and say whether its statement is consistent; exit code 1 if not."""

    folder = chosen_folder(run, run_dir)
    if is_federation(folder):
        if ledger is not None:
            raise UsageError(OF_CLIENTS)
        values, text, consistent = _of_federation(folder, key)
    else:
        from equipoise.report import RunFolderError, read_run
        from equipoise.statements import verify_run  # needs no PyTorch

        quiet()
        found = verify_run(folder, ledger_file=ledger, public_key=key)
        unfinished = ""
        with suppress(RunFolderError):  # a finding says so
            read = read_run(folder)
            unfinished = read.steps_in_words if read.is_unfinished else ""
        values = {**found.to_json(), "unfinished": bool(unfinished)}
        text = f"{found}\nThe run is unfinished: {unfinished} steps were taken." if unfinished else str(found)
        consistent = found.consistent
    if json_output:
        emit(values)
    else:
        from rich.text import Text

        console = open_console(False)
        shown = Text(wrapped(text, console.width, indent=5))
        shown.highlight_regex(r"(?m)^yes\b|\bconsistent\b", "green")
        shown.highlight_regex(r"(?m)^NO\b|NOT CONSISTENT|NOT PRIVATE|The signature is missing", "bold red")
        console.print(shown, soft_wrap=True)
    if not consistent:
        raise typer.Exit(1)


def _of_federation(folder: str, key: str | None) -> tuple[dict[str, Any], str, bool]:
    """Plain values; one line per client, and the whole answer; whether it is consistent."""
    with loading():
        from equipoise.app.federation.folder import verify_federation
        from equipoise.statements.statement import SEEDED

    found = verify_federation(folder, key)
    words = {True: "consistent", False: "NOT CONSISTENT"}
    lines = []
    for name, client in found.clients.items():
        spent = "no epsilon" if client.epsilon is None else f"epsilon {rounded_up(client.epsilon)}"
        basis = "its journal" if client.with_journal else "its published files only"
        lines.append(f"client {name}: {spent}, {words[client.consistent]} with {basis}.{client.rest}")
        lines += [f"  {one.subject}: {one.detail}" for one in client.findings if one.ok is False]
    whose = "" if key is not None else " (whose that is was not checked)"
    signed = "" if found.signer is None else f" Signed by the key {found.signer}{whose}."
    lines += [
        *found.problems,
        "",
        f"The federation is {words[found.consistent]}: {len(found.clients)} clients with a statement."
        + signed,
    ]
    if not all(client.private for client in found.clients.values()):
        lines.append(f"NOT PRIVATE: {SEEDED}")
    return found.to_json(), "\n".join(lines), found.consistent


def sign(
    run: RunArgument = None,
    key: Annotated[
        str | None, typer.Option(help="Ed25519 private key, PEM or OpenSSH; or env:NAME.", metavar="FILE")
    ] = None,
    password: Password = None,
    ledger: LedgerFile = None,
    json_output: Json = False,
    run_dir: RunDir = None,
) -> None:
    """Sign the statement and the published files of a run or federation, after verifying them."""

    folder = chosen_folder(run, run_dir)
    if ledger is not None and is_federation(folder):
        raise UsageError(OF_CLIENTS)
    if key is None:
        raise UsageError(
            "--key is missing. Make a private key once: openssl genpkey -algorithm ed25519 -out key.pem; "
            f"then: equipoise sign {shlex.quote(folder)} --key key.pem. Keep the key outside of every "
            "repository and of the run folder: whoever has it signs in your name."
        )
    found = sign_with(folder, read_key(key, password), ledger)
    answer(found, json_output, f"signed by the key [bold]{found['signer']}[/]: {found['signature']}")


def read_key(key: str, password: str | None) -> Ed25519PrivateKey:
    """The private key, before anything else is done; asks for the password that it has, if none is given."""
    with loading():
        from equipoise.statements import KeyFileError
        from equipoise.statements.sign import key_content, read_private_key

    content = key_content(key)
    given = None if password is None else key_content(password, "password").rstrip(b"\r\n")
    try:
        return read_private_key(content, given)
    except KeyFileError as error:
        if "assword" not in str(error) or given is not None:
            raise
    return read_private_key(content, typer.prompt(f"password of {key}", hide_input=True, err=True).encode())


def sign_with(folder: str, key: Ed25519PrivateKey, ledger: str | None) -> dict[str, Any]:
    """Sign, and tell by whom and where."""
    from equipoise.app.federation.folder import SIGNATURE, sign_federation
    from equipoise.statements import sign_run
    from equipoise.statements.sign import fingerprint

    federation = is_federation(folder)
    made = sign_federation(folder, key) if federation else sign_run(folder, key, ledger_file=ledger)
    return {
        "run_dir": folder,
        "signer": fingerprint(made.public_key),
        "signature": str(Path(folder) / (SIGNATURE if federation else "statement.sig.json")),
        "files": made.files,
    }
