"""The folder of a finished run: verify its statement, sign it, charge it for a search.

Anybody may have the published files: statement.json, config.json, model.safetensors, metrics.jsonl,
report.html and, where the issuer signed, statement.sig.json. The data owner also has the journal, in private/
or where the run's ledger was put. Nothing else is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise._files import PathLike, write_atomically
from equipoise.methods.configuration import field_types
from equipoise.privacy import Journal, JournalError, PrivateSearch
from equipoise.privacy.ledger.journal import Entry, SearchEntry
from equipoise.privacy.ledger.journal_records import JournalRecords
from equipoise.report import RunFolderError, report_as_made, write_report
from equipoise.report.json_files import each_row, read_file, read_object
from equipoise.report.run_reader import file_of_run
from equipoise.statements import (
    Finding,
    Signature,
    Statement,
    check_published,
    check_with_journal,
    statement_from_journal,
)
from equipoise.statements.recompute import MALFORMED, finite_number, message
from equipoise.statements.sign import check_files, fingerprint, read_signature, sign_files, signing_key
from equipoise.training.folder.config_file import is_of_this_version, of_another_version
from equipoise.training.folder.consistency import (
    check_assumptions,
    check_method,
    check_metrics,
    check_settings,
)
from equipoise.training.folder.run_folder import RunFolder
from equipoise.training.setup.training_settings import TrainingSettings

__all__ = ["Verification", "charge_search", "check_signable", "sign_run", "sign_verified", "verify_run"]

SIGNED_RUN_FILES = ("statement.json", "model.safetensors", "config.json", "metrics.jsonl", "report.html")


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
    """

    run_dir: str
    with_journal: bool
    epsilon: float | None
    signer: str | None
    findings: tuple[Finding, ...]
    private: bool
    no_guarantee: str | None

    @property
    def consistent(self) -> bool:
        """Whether nothing was found wrong."""
        return all(finding.ok is not False for finding in self.findings)

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
    folder = RunFolder(run_dir)
    statement = _read_statement(folder)
    config = read_object(folder.config) if folder.config.is_file() else {}
    journal = _journal_file(folder, ledger_file)
    findings = check_published(statement) if journal is None else _check_journal(statement, journal)
    findings += check_settings(statement, config)
    findings += _skipped(folder, config)
    findings += check_assumptions(statement, config)
    findings += check_method(statement, config)
    findings += _check_metrics(folder, statement, config)
    findings += _check_page(folder, config)
    signature, found = _check_signature(folder, journal, statement, public_key)
    return Verification(
        run_dir=str(run_dir),
        with_journal=journal is not None,
        epsilon=finite_number(statement.get("epsilon")),
        signer=None if signature is None else fingerprint(signature.public_key),
        findings=(*findings, *found),
        private=statement.get("private") is True,
        no_guarantee=_no_guarantee(statement),
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
) -> Signature:
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
    # Before the long check: a wrong password should be told at once.
    key = signing_key(key_file, password)
    check_signable(verify_run(run_dir, ledger_file=ledger_file))
    return sign_verified(run_dir, key, ledger_file=ledger_file)


def check_signable(found: Verification) -> None:
    """Refuse what is not consistent; an old signature may be of other files.

    Raises:
        RunFolderError: naming the first thing that is wrong.
    """
    wrong = [f"{f.subject}: {f.detail}" for f in found.findings if f.ok is False and f.subject != "signature"]
    if wrong:
        raise RunFolderError(
            f"run={found.run_dir!r} has a statement that is not consistent, so it was not signed. {wrong[0]}"
        )


def sign_verified(
    run_dir: PathLike, key: Ed25519PrivateKey, *, ledger_file: PathLike | None = None
) -> Signature:
    """Sign a run that `check_signable` let through; arguments as for `sign_run`."""
    folder = RunFolder(run_dir)
    journal = _journal_file(folder, ledger_file)
    lines = None if journal is None else _hash_of_lines(journal, str(_read_statement(folder)["run"]))
    made = sign_files(key, folder.path, SIGNED_RUN_FILES, lines)
    write_atomically(folder.signature, made.to_json().encode(), mode=0o644)
    return made


def charge_search(
    run_dir: PathLike, search: PrivateSearch, *, ledger_file: PathLike | None = None
) -> Statement:
    """Charge a run for having been chosen among a random number of runs; statement and report are rewritten.

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
    folder = RunFolder(run_dir)
    statement = _read_statement(folder)
    path = _journal_file(folder, ledger_file)
    if path is None:
        raise RunFolderError(f"run={str(run_dir)!r} has no journal here; name it with ledger_file=...")
    run = str(statement["run"])
    with closing(Journal(path, durable=True, existing=True)) as journal:
        wrong = [f for f in check_with_journal(statement, journal) if f.ok is False]
        if wrong:
            found = f"{wrong[0].subject}: {wrong[0].detail}"
            raise RunFolderError(f"run={str(run_dir)!r} is not consistent: {found}")
        record = JournalRecords.of(journal).runs[run]
        if not record.closed:
            raise RunFolderError(f"run={str(run_dir)!r} is not finished; a search ends with a finished run")
        if record.search is not None:
            raise RunFolderError(f"run={str(run_dir)!r} was charged for a search already")
        charge = SearchEntry(run=run, search=search)
        kept = {key: statement[key] for key in ("recipe", "epsilon_claimed")}
        before = statement_from_journal(journal, run, statement["delta"]).assumptions
        # Those that follow from the journal are made anew; the training's own are carried over.
        kept["assumptions"] = [text for text in statement["assumptions"] if text not in before]
        made = statement_from_journal(chain(journal, [charge]), run, statement["delta"], **kept)
        # The charge first, and on its device: a statement that names it must not lie next to a journal
        # without.
        journal.append(charge)
    folder.signature.unlink(missing_ok=True)  # it was of another statement
    write_atomically(folder.statement, (made.to_json() + "\n").encode(), mode=0o644)
    write_report(folder.path)
    return made


# ---- inside


def _journal_file(folder: RunFolder, given: PathLike | None) -> Path | None:
    """The journal of the run, if it is here."""
    if given is not None:
        if not Path(given).is_file():
            raise RunFolderError(f"ledger={str(given)!r} is no file; name the journal that the run was given")
        return Path(given)
    named = folder.private / "ledger_file"
    if named.is_file():
        place = Path(os.fsdecode(read_file(named)))
        if not place.is_file():
            raise RunFolderError(
                f"run={str(folder.path)!r} was booked in {str(place)!r}, which is not there any more; name "
                "the journal with --ledger"
            )
        return place
    return folder.journal if folder.journal.is_file() else None


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
    folder: RunFolder, journal: Path | None, statement: Mapping[str, Any], public_key: PathLike | None
) -> tuple[Signature | None, list[Finding]]:
    signature, findings = read_signature(folder.signature, public_key)
    if signature is None or findings[0].ok is False:
        return signature, findings
    findings.append(check_files(signature, folder.path, SIGNED_RUN_FILES, needed=("statement.json",)))
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


_COMPARED = ("settings", "sampling", "budget", "method", "plan", "assumptions")
_SETTINGS = ("reproducible", "hardened", "relation", "allow_public_duplicates")


def _skipped(folder: RunFolder, config: Mapping[str, Any]) -> list[Finding]:
    """What cannot be looked at because a file or a key of it is not here."""
    found = []
    if not folder.config.is_file():
        detail = "config.json is not here: settings, sampling and method were not compared"
        found.append(Finding("configuration", None, detail))
    else:
        settings = config.get("settings")
        within = settings if isinstance(settings, Mapping) else dict.fromkeys(_SETTINGS)
        gone = [key for key in _COMPARED if key not in config]
        gone += [f"settings.{key}" for key in _SETTINGS if key not in within]
        if gone:
            detail = f"config.json has no {', '.join(gone)}: what they would say was not compared"
            found.append(Finding("configuration", None, detail))
        others = sorted(settings.keys() - field_types(TrainingSettings)) if within is settings else []
        if others:
            found.append(Finding("configuration", None, of_another_version("settings", others)))
    for subject, path in (("metrics", folder.metrics), ("page", folder.path / "report.html")):
        if not path.is_file():
            found.append(Finding(subject, None, f"{path.name} is not here"))
    return found


def _check_metrics(
    folder: RunFolder, statement: Mapping[str, Any], config: Mapping[str, Any]
) -> list[Finding]:
    if not folder.metrics.is_file():
        return []
    try:
        return check_metrics(statement, config, each_row(folder.metrics))
    except (*MALFORMED, OSError) as error:
        detail = f"it is not what this library writes ({message(error)})"
        return [Finding("metrics", False, detail)]


def _check_page(folder: RunFolder, config: Mapping[str, Any]) -> list[Finding]:
    """Whether report.html is the page that the other files make."""
    if not (folder.path / "report.html").is_file():
        return []
    try:
        same = report_as_made(folder.path)
    except RunFolderError as error:
        return [Finding("page", False, f"report.html cannot be made of these files: {error}")]
    if same is False and "plan" in config and not is_of_this_version(config):
        same = None  # pages had another form
    detail = {
        True: "report.html is what these files make",
        None: "report.html was made by another version or of files that are not here, and was not compared",
        False: "report.html is not what these files make: page or files were edited; make it again with "
        f"equipoise report {folder.path}",
    }
    return [Finding("page", same, detail[same])]


def _read_statement(folder: RunFolder) -> dict[str, Any]:
    return read_object(file_of_run(folder.path, folder.statement.name))
