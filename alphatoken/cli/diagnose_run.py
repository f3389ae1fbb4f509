"""Running diagnostics: each one finished is kept, each one that cannot run says why."""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alphatoken.cli.diagnose_options import DiagnoseOptions, Request, read_request
from alphatoken.cli.diagnose_subject import Prepared, check_files, prepare
from alphatoken.corpus.folder import collected_warnings, refuse_foreign, require_writable
from alphatoken.errors import AlphaTokenError, ConfigError, ModelError
from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.page import LEAD, section_of
from alphatoken.fidelity.registry import DIAGNOSTICS, Entry
from alphatoken.fidelity.rounds import diagnosed_within
from alphatoken.fidelity.subject import Subject, require_retention
from alphatoken.report.page import missing_libraries, render_page, write_page
from alphatoken.support.storage import write_json

__all__ = ["run"]

_MANIFEST, _PAGE = "run.json", "report.html"


def run(words: Sequence[str]) -> int:
    """Run what ``words`` ask for; the exit status.

    Raises:
        AlphaTokenError: wrong input, or the one diagnostic asked for cannot run.
        KeyboardInterrupt: says what is kept.
    """
    request = read_request(*words)
    options = request.shared
    _check_libraries()
    check_files(options)
    if len(request.entries) == 1 and request.entries[0].needs_retention:
        require_retention(options.retention_set)
    out = Path(options.output_dir)
    _check_out(out, options)
    try:
        prepared = prepare(options)
        for note in () if options.quiet else prepared.notes:
            print(f"note: {note}", file=sys.stderr)
        if options.overwrite_output:
            _clear(out)
        folder = _Folder(out, prepared, request)
        folder.write()
        _run_each(request, prepared.subject, folder)
    except KeyboardInterrupt:
        done = sum(Diagnosis.finished(out / entry.name) for entry in request.entries)
        raise KeyboardInterrupt(
            f"{done} of {len(request.entries)} diagnoses are finished and kept in {out}"
        ) from None
    print(f"report: {folder.path / _PAGE}")
    failed = [entry.name for entry in request.entries if entry.name in folder.failures]
    if failed:
        print(
            f"alphatoken: {len(failed)} of {len(request.entries)} diagnostics could not run: "
            f"{', '.join(failed)}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _run_each(
    request: Request,
    subject: Subject,
    folder: _Folder,
) -> None:
    quiet, count = request.shared.quiet, len(request.entries)
    for number, entry in enumerate(request.entries, start=1):
        if not quiet:
            print(f"[{number}/{count}] {entry.name}: {entry.question}", file=sys.stderr)
        start = time.monotonic()
        try:
            diagnosis = diagnosed_within(
                request.budget,
                subject,
                request.given,
                partial(_one_round, entry, request.options[entry.name]),
                said=request.shared.budget,
            )
        except Exception as error:
            if count == 1 or isinstance(error, OSError) or request.shared.traceback:
                raise
            reason = _reason(error)
            print(f"alphatoken: {entry.name} could not run: {reason}", file=sys.stderr)
            folder.fail(entry.name, reason)
            continue
        folder.keep(diagnosis, time.monotonic() - start)
        print(f"{diagnosis.name} ({time.monotonic() - start:.0f} s): {diagnosis.question}")
        print(f"  {diagnosis.conclusion}")
        print(f"  files: {folder.path / diagnosis.name}", flush=True)


def _one_round(entry: Entry, options: Any, subject: Subject) -> Diagnosis:
    """A diagnosis of these sizes; it does not depend on what ran before it."""
    torch.manual_seed(subject.seed)
    try:
        with collected_warnings() as warned:
            diagnosis: Diagnosis = entry.load().diagnose(subject, options)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "out of memory",
            got=str(error)[:200],
            remedy="a smaller --per_device_train_batch_size, --tokens or --max_length",
        ) from None
    more = [sentence for sentence in warned if sentence not in diagnosis.notes]
    return replace(diagnosis, notes=(*diagnosis.notes, *more))


def _reason(error: Exception) -> str:
    """One line; what was not raised on purpose is shown with its traceback on stderr as well."""
    text = " ".join(str(error).split())
    if isinstance(error, AlphaTokenError):
        return text
    traceback.print_exception(error)
    return f"a mistake in this program, {type(error).__name__}: {text}; please report it"


# --- before the model is loaded -------------------------------------------------------------------


def _check_libraries() -> None:
    if missing := missing_libraries():
        raise ConfigError(
            f"diagnoses need {' and '.join(missing)}", remedy="pip install 'alphatoken[diagnose]'"
        )


def _check_out(path: Path, options: DiagnoseOptions) -> None:
    """See that the folder can be written, and holds nothing that would be mixed up."""
    require_writable(path)
    path.mkdir(parents=True, exist_ok=True)
    refuse_foreign(
        path / _MANIFEST,
        [path / entry.name for entry in DIAGNOSTICS],
        resume=None,
        overwrite=options.overwrite_output,
    )


# --- the folder -----------------------------------------------------------------------------------


@dataclass
class _Folder:
    """The results of one run; ``report.html`` shows what is there.

    Attributes:
        path: the folder.
        prepared: what is diagnosed.
        request: the diagnostics and the command.
        done: finished diagnoses by name, and how long each took.
        failures: why diagnostics could not run.
    """

    path: Path
    prepared: Prepared
    request: Request
    done: dict[str, tuple[Diagnosis, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def keep(self, diagnosis: Diagnosis, seconds: float) -> None:
        """Write a diagnosis, and the page with it."""
        diagnosis.save(self.path / diagnosis.name)
        self.done[diagnosis.name] = diagnosis, round(seconds, 1)
        self.write()

    def fail(self, name: str, reason: str) -> None:
        """Note why there is none."""
        self.failures[name] = reason
        self.write()

    def write(self) -> None:
        """Write settings and page."""
        settings, entries = self.prepared.settings, self.request.entries
        seconds = {name: seconds for name, (_, seconds) in self.done.items()}
        document = {"settings": settings, "seconds": seconds}
        write_json(self.path / _MANIFEST, document, default=str)
        found = {name: diagnosis for name, (diagnosis, _) in self.done.items()}
        page = render_page(
            f"How far to trust the values: {'/'.join(Path(settings['model']).parts[-2:])}",
            f"{len(found)} of {len(entries)} diagnoses. {LEAD}",
            [
                section_of(
                    entry.name,
                    entry.question,
                    found.get(entry.name),
                    failure=self.failures.get(entry.name, ""),
                    shared=settings,
                )
                for entry in entries
            ],
            contents=True,
            rows=self.prepared.notes,
            settings=settings,
            command=self.request.command,
        )
        write_page(self.path / _PAGE, page)


def _clear(path: Path) -> None:
    """Remove an earlier run, and nothing else that may lie in the folder."""
    for entry in DIAGNOSTICS:
        shutil.rmtree(path / entry.name, ignore_errors=True)
    for name in (_PAGE, _MANIFEST):
        (path / name).unlink(missing_ok=True)
