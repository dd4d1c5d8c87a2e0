"""The folder of a finished run: verify its statement, sign it, charge it for a search.

Anybody may have the published files: statement.json, config.json, model.safetensors, metrics.jsonl,
report.html and, where the issuer signed, statement.sig.json. The data owner also has the journal, in private/
or where the run's ledger was put. Nothing else is opened.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise._files import PathLike, write_atomically
from equipoise._lazy import later
from equipoise._relations import condition_in_words
from equipoise._run_files import RunFolderError, each_row, file_of_run, finite_number, read_file, read_object
from equipoise.privacy.accounting.private_search import PrivateSearch
from equipoise.privacy.errors import JournalError
from equipoise.privacy.ledger.journal import Entry, Journal, SearchEntry
from equipoise.privacy.ledger.journal_records import JournalRecords
from equipoise.statements.checks import check_published, check_with_journal, statement_from_journal
from equipoise.statements.consistency import (
    SETTINGS,
    check_assumptions,
    check_metrics,
    check_settings,
    texts_of,
)
from equipoise.statements.recompute import MALFORMED, Finding, message
from equipoise.statements.statement import SEEDED, Statement, independence_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from equipoise.statements import sign
else:
    sign = later("equipoise.statements.sign")  # only who signs, or checks a signature, needs cryptography

STATEMENT, SIGNATURE, CONFIG, METRICS = (
    "statement.json",
    "statement.sig.json",
    "config.json",
    "metrics.jsonl",
)
MODEL, PAGE = "model.safetensors", "report.html"
SIGNED_RUN_FILES = (STATEMENT, MODEL, CONFIG, METRICS, PAGE)


@dataclass(frozen=True)
class Verification:
    """What was found about the statement of a run.

    Attributes:
        run_dir: the folder.
        with_journal: whether the run's journal was there, so that epsilon follows from what was booked.
        epsilon: as the statement has it.
        signer: fingerprint of the key that signed, or None.
        findings: at least one per subject.
        private: False if the statement says that noise and sampling follow from a public seed.
        no_guarantee: why the statement gives no guarantee, in its own words; None where it gives one.
        independence: whether records are kept apart by "model" and "data": proved, compared or unchecked.
    """

    run_dir: str
    with_journal: bool
    epsilon: float | None
    signer: str | None
    findings: tuple[Finding, ...]
    private: bool
    no_guarantee: str | None
    independence: Mapping[str, str]

    @property
    def consistent(self) -> bool:
        """Whether nothing was found wrong."""
        return all(finding.ok is not False for finding in self.findings)

    @property
    def rest(self) -> str:
        """What the figures rest on where not all is proved, and the subjects nothing was found out about."""
        condition = condition_in_words(self.independence).removeprefix(",")
        unchecked = ", ".join(dict.fromkeys(one.subject for one in self.findings if one.ok is None))
        return (f" Its figures hold{condition}." if condition else "") + (
            f" Not checked: {unchecked}." if unchecked else ""
        )

    def __str__(self) -> str:
        """A line per finding, and the verdict with all that a reader must hear of."""
        marks, basis = {True: "yes", False: "NO", None: "?"}, "its published files only"
        width = max(len(one.subject) for one in self.findings)
        rows = [f"{marks[one.ok]:5}{one.subject:{width}}  {one.detail}" for one in self.findings]
        word = "consistent" if self.consistent else "NOT CONSISTENT"
        verdict = f"The statement is {word} with {'the journal' if self.with_journal else basis}"
        verdict += "." if self.signer else ", and nobody signed it."
        if [one.subject for one in self.findings if one.ok is False] == ["signature"]:
            verdict = "The signature is missing or wrong; all else is consistent."
        rows += ["", verdict + self.rest]
        if self.no_guarantee is not None:
            rows.append(f"Guarantee: none: {self.no_guarantee}")
        return "\n".join(rows if self.private else [*rows, f"NOT PRIVATE: {SEEDED}"])

    @property
    def not_checked(self) -> list[str]:
        """What the files at hand cannot show to be true, each as a sentence."""
        return [f"{finding.subject}: {finding.detail}" for finding in self.findings if finding.ok is None]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "consistent": self.consistent, "not_checked": self.not_checked}


def verify_run(
    run_dir: PathLike, *, ledger_file: PathLike | None = None, public_key: PathLike | None = None
) -> Verification:
    """Compute the statement of a run again and compare.

    Args:
        run_dir: the run folder, or the published part of one.
        ledger_file: the journal, where it is not the folder's own.
        public_key: file with the issuer's Ed25519 public key; the run must then be signed with it.

    Raises:
        RunFolderError: no statement, or a file that cannot be read.
        KeyFileError: no public key in the file.
    """
    folder = Path(run_dir)
    statement = _read_statement(folder)
    config = read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    journal = _journal_file(folder, ledger_file)
    findings = check_published(statement) if journal is None else _check_journal(statement, journal)
    findings += check_settings(statement, config)
    findings += _skipped(folder, config)
    findings += check_assumptions(statement, config)
    findings += _check_metrics(folder / METRICS, statement, config)
    signature, found = _check_signature(folder, journal, statement, public_key)
    found = _check_model(folder / MODEL, statement) + found
    words = {MODEL: f"what {MODEL} holds", METRICS: "the scores", PAGE: PAGE}
    signed = () if signature is None else signature.files
    if unsigned := [word for name, word in words.items() if (folder / name).is_file() and name not in signed]:
        found.append(Finding("unsigned", None, f"nobody signed {', '.join(unsigned)}: compared with nothing"))
    return Verification(
        run_dir=str(run_dir),
        with_journal=journal is not None,
        epsilon=finite_number(statement.get("epsilon")),
        signer=None if signature is None else sign.fingerprint(signature.public_key),
        findings=(*findings, *found),
        private=statement.get("private") is True,
        no_guarantee=_no_guarantee(statement),
        independence=independence_of(texts_of(statement.get("assumptions"))),
    )


def _no_guarantee(statement: Mapping[str, Any]) -> str | None:
    """The reason of the first hole where there is no guarantee; whatever a file holds, it can be printed."""
    if statement.get("guarantee") != "none":
        return None
    try:
        reason = str(statement["holes"][0]["reason"])
    except MALFORMED:
        return "the statement names no hole of this run; another run in the journal is not private"
    return "".join(c if c.isprintable() else "?" for c in reason[:300])


def sign_run(
    run_dir: PathLike,
    key_file: PathLike | Ed25519PrivateKey,
    *,
    ledger_file: PathLike | None = None,
    password: bytes | None = None,
) -> sign.Signature:
    """Sign the statement of a run with the model and the other published files; writes statement.sig.json.

    Args:
        run_dir: the run folder.
        key_file: an Ed25519 private key, or its file (PEM or OpenSSH), which is read and not kept.
        ledger_file: the journal, where it is not the folder's own.
        password: of the key file, if it has one.

    Raises:
        RunFolderError: no statement, or one that does not agree with the journal: it is not signed.
        KeyFileError: no such key.
    """
    # Before the long check: a wrong password should show at once.
    key = sign.signing_key(key_file, password)
    check_consistent(verify_run(run_dir, ledger_file=ledger_file), "it was not signed", ("signature",))
    return sign_verified(run_dir, key, ledger_file=ledger_file)


def check_consistent(found: Verification, left_out: str, besides: Sequence[str] = ()) -> None:
    """Refuse what is not consistent.

    Args:
        found: of the run.
        left_out: what is therefore not done, in words.
        besides: subjects that are not looked at: an old signature may be of other files.

    Raises:
        RunFolderError: naming the first thing that is wrong.
    """
    wrong = [f"{f.subject}: {f.detail}" for f in found.findings if f.ok is False and f.subject not in besides]
    if wrong:
        raise RunFolderError(
            f"run={found.run_dir!r} has a statement that is not consistent, so {left_out}. {wrong[0]}"
        )


def sign_verified(
    run_dir: PathLike, key: Ed25519PrivateKey, *, ledger_file: PathLike | None = None
) -> sign.Signature:
    """Sign a run that `check_consistent` let through; arguments as for `sign_run`."""
    folder = Path(run_dir)
    journal = _journal_file(folder, ledger_file)
    lines = None if journal is None else _hash_of_lines(journal, str(_read_statement(folder)["run"]))
    made = sign.sign_files(key, folder, SIGNED_RUN_FILES, lines)
    write_atomically(folder / SIGNATURE, made.to_json().encode(), mode=0o644)
    return made


def charge_search(
    run_dir: PathLike, search: PrivateSearch, *, ledger_file: PathLike | None = None
) -> Statement:
    """Charge a run for having been chosen among a random number of runs; the statement is rewritten.

    Page and signature are of the old statement, and are removed: make them anew (`equipoise report`,
    `equipoise sign`).

    The charge is computed from this run's plan. It covers the search only if no candidate's plan has a larger
    Renyi divergence at any order, which is yours to see to: the same epsilon at one delta is not enough.
    Settings that leave sampling, noise multipliers and counts alone keep the same plan.

    Args:
        run_dir: the folder of the chosen run, finished.
        search: the law that the number of runs was drawn from before the first of them.
        ledger_file: the journal, where it is not the folder's own.

    Raises:
        RunFolderError: no finished run, or one that was charged for a search before.
        PlanError: no accountant covers a search over runs of this kind.
    """
    folder = Path(run_dir)
    statement = _read_statement(folder)
    path = _journal_file(folder, ledger_file)
    if path is None:
        raise RunFolderError(f"run={str(run_dir)!r} has no journal here; name it with ledger_file=...")
    run = str(statement["run"])
    with closing(Journal(path, durable=True, existing=True)) as journal:
        record = JournalRecords.of(journal).runs[run]
        # Killed between the journal's line and the statement: the line stands, and the statement follows.
        half_done = record.search == search and statement["search"] is None
        wrong = [f for f in check_with_journal(statement, journal) if f.ok is False]
        if wrong and not half_done:
            found = f"{wrong[0].subject}: {wrong[0].detail}"
            raise RunFolderError(f"run={str(run_dir)!r} is not consistent: {found}")
        if not record.closed:
            raise RunFolderError(f"run={str(run_dir)!r} is not finished; a search ends with a finished run")
        if record.search is not None and not half_done:
            raise RunFolderError(f"run={str(run_dir)!r} was charged for a search already")
        charge = [] if half_done else [SearchEntry(run=run, search=search)]
        kept = {key: statement[key] for key in ("recipe", "epsilon_claimed")}
        before = statement_from_journal(journal, run, statement["delta"]).assumptions
        # Those that follow from the journal are made anew; the training's own are carried over.
        kept["assumptions"] = [text for text in statement["assumptions"] if text not in before]
        made = statement_from_journal(chain(journal, charge), run, statement["delta"], **kept)
        # The charge first, and on its device: a statement that names it must not lie next to a journal
        # without.
        for entry in charge:
            journal.append(entry)
    for name in (SIGNATURE, PAGE):  # they are of another statement
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / STATEMENT, (made.to_json() + "\n").encode(), mode=0o644)
    return made


# ---- inside


def _journal_file(folder: Path, given: PathLike | None) -> Path | None:
    """The journal of the run, if it is here."""
    if given is not None:
        if not Path(given).is_file():
            raise RunFolderError(f"ledger={str(given)!r} is no file; name the journal that the run was given")
        return Path(given)
    named = folder / "private" / "ledger_file"
    if named.is_file():
        place = Path(os.fsdecode(read_file(named)))
        if not place.is_file():
            raise RunFolderError(
                f"run={str(folder)!r} was booked in {str(place)!r}, which is not there any more; name "
                "the journal with --ledger"
            )
        return place
    own = folder / "private" / "journal.jsonl"
    return own if own.is_file() else None


def _check_journal(statement: Mapping[str, Any], path: Path) -> list[Finding]:
    try:
        with closing(Journal(path, read_only=True)) as journal:
            return check_with_journal(statement, journal)
    except JournalError as error:
        return [Finding("journal", False, str(error))]


def _hash_of_lines(path: Path, run: str) -> str:
    """SHA-256 of the run's entries, as one JSON list; the same whatever other runs wrote since."""
    # Parsed and written again, so that neither white space nor the order of keys changes the hash.
    found, between = hashlib.sha256(b"["), b""
    with closing(Journal(path, read_only=True)) as journal:
        for line in journal:
            if isinstance(line, Entry) and line.run == run:
                found.update(
                    between + json.dumps(line.to_json(), sort_keys=True, separators=(",", ":")).encode()
                )
                between = b","
    found.update(b"]")
    return found.hexdigest()


def _check_signature(
    folder: Path, journal: Path | None, statement: Mapping[str, Any], public_key: PathLike | None
) -> tuple[sign.Signature | None, list[Finding]]:
    if find_spec("cryptography") is None and public_key is None:
        is_signed = (folder / SIGNATURE).is_file()
        detail = "not checked: install cryptography" if is_signed else "the run is not signed"
        return None, [Finding("signature", None, detail)]
    signature, findings = sign.read_signature(folder / SIGNATURE, public_key)
    if signature is None:
        return signature, findings
    # A page that was made after the signature is nobody's word; any other file next to a signed statement is.
    names = [name for name in SIGNED_RUN_FILES if name != PAGE or name in signature.files]
    findings.append(sign.check_files(signature, folder, names, needed=(STATEMENT,)))
    if journal is not None and signature.journal is not None:
        try:
            lines = _hash_of_lines(journal, str(statement.get("run")))
        except JournalError:
            lines = ""  # the finding on the journal says what is wrong with it
        same = lines == signature.journal
        findings.append(
            Finding("signed journal", same, "as it was signed" if same else "changed since it was signed")
        )
    return signature, findings


_LARGEST_HEAD = 10**8  # bytes that safetensors reads at most
_COMPARED = ("settings", "sampling", "budget", "method", "plan", "assumptions")


def _skipped(folder: Path, config: Mapping[str, Any]) -> list[Finding]:
    """What is not compared, because a file or a key of it is not here or nothing else says the same."""
    found, settings = [], config.get("settings")
    settings = settings if isinstance(settings, Mapping) else dict.fromkeys(SETTINGS)
    gone = [key for key in _COMPARED if key not in config]
    gone += [f"settings.{key}" for key in SETTINGS if key not in settings]
    if not (folder / CONFIG).is_file():
        found.append(Finding("configuration", None, "config.json is not here, and was not compared"))
    elif gone:
        detail = f"config.json has no {', '.join(gone)}: what they would say was not compared"
        found.append(Finding("configuration", None, detail))
    others = [key for key in settings if key not in SETTINGS]
    others += [key for key in config if key not in (*_COMPARED, "conditions", "format")]
    if config:
        detail = (
            f"of config.json not compared: {', '.join([*others, 'budget.epsilon', 'method but its recipe'])}"
        )
        found.append(Finding("further settings", None, detail[:600]))
    if not (folder / METRICS).is_file():
        found.append(Finding("metrics", None, f"{METRICS} is not here"))
    return found


def _check_metrics(path: Path, statement: Mapping[str, Any], config: Mapping[str, Any]) -> list[Finding]:
    try:
        return check_metrics(statement, config, each_row(path)) if path.is_file() else []
    except (*MALFORMED, OSError) as error:
        return [Finding("metrics", False, f"it is not what this library writes ({message(error)})")]


def _check_model(path: Path, statement: Mapping[str, Any]) -> list[Finding]:
    """Whether the model's file names the run of the statement in its head."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            size = min(int.from_bytes(file.read(8), "little"), _LARGEST_HEAD)
            run = json.loads(file.read(size))["__metadata__"]["run"]
    except (*MALFORMED, OSError) as error:
        return [Finding("model", False, f"{path.name} names no run ({message(error)})")]
    if run != statement.get("run"):
        return [Finding("model", False, f"{path.name} is that of another run")]
    return [Finding("model", True, f"{path.name} names this run")]


def _read_statement(folder: Path) -> dict[str, Any]:
    return read_object(file_of_run(folder, STATEMENT))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: prints what was found, and returns 0 if the statement is consistent."""
    parser = argparse.ArgumentParser(
        "python -m equipoise.statements.verify", description="Compute the privacy of a run again."
    )
    parser.add_argument("run", help="the run folder, or its published files")
    parser.add_argument("--ledger", metavar="FILE", help="the run's journal, if it is not in the folder")
    parser.add_argument("--key", metavar="FILE", help="the issuer's public key; the run must be signed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        found = verify_run(given.run, ledger_file=given.ledger, public_key=given.key)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found.to_json()) if given.json else found)
    return not found.consistent


if __name__ == "__main__":
    sys.exit(main())
