"""Run of diagnostics: finished ones are kept, and one that cannot run says why."""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from alphatoken.cli.diagnose_options import Request, read_request
from alphatoken.cli.diagnose_subject import Prepared, check_files, prepare
from alphatoken.diagnose.clouds import require_sklearn
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.page import LEAD, section_of
from alphatoken.diagnose.registry import DIAGNOSTICS, Entry
from alphatoken.diagnose.rounds import diagnosed_before
from alphatoken.diagnose.subject import Subject, require_retention
from alphatoken.errors import AlphaTokenError, ConfigError, ModelError, collected_warnings
from alphatoken.score.page import render_page
from alphatoken.support.progress import shown_progress
from alphatoken.support.resume import (
    check_output_folder,
    command_of,
    read_run,
    refuse_other_run,
    require_writable,
)
from alphatoken.support.storage import write_json, write_text

__all__ = ["run"]

_MANIFEST, _PAGE = "run.json", "report.html"
_BESIDE_VALUES = "diagnosis"
"""The folder of the diagnoses in one that ``score`` wrote, which has a manifest and a page too."""


def run(words: Sequence[str]) -> int:
    """Run what ``words`` ask for and is not finished yet; the exit status.

    Raises:
        AlphaTokenError: wrong input, or the one diagnostic asked for cannot run.
        KeyboardInterrupt: says how to go on.
    """
    request = read_request(*words)
    options = request.shared
    if find_spec("matplotlib") is None:
        raise ConfigError("diagnoses need matplotlib", remedy="pip install 'alphatoken[diagnose]'")
    if any(entry.needs_sklearn for entry in request.entries):
        require_sklearn()
    check_files(options)
    blind = [entry.name for entry in request.entries if entry.needs_retention]
    if len(request.entries) == 1 and blind:
        require_retention(options.retention_set)
    elif blind and not options.retention_set:
        print(f"note: {', '.join(blind)} will not run without --retention_set", file=sys.stderr)
    out = Path(options.output_dir)
    if command_of(out / _MANIFEST) == "score":
        out /= _BESIDE_VALUES
        print(f"note: the folder holds values; the diagnoses go to {out}", file=sys.stderr)
    require_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    check_output_folder(
        out / _MANIFEST,
        [out / entry.name for entry in DIAGNOSTICS],
        "diagnose",
        resume=options.resume,
        overwrite=options.overwrite_output,
    )
    try:
        prepared = prepare(options)
        for note in () if options.quiet else prepared.notes:
            print(f"note: {note}", file=sys.stderr)
        folder = _Folder.open(out, prepared, request)
        with shown_progress(not options.quiet):
            _run_each(request, prepared.subject, folder)
    except KeyboardInterrupt:
        done = sum(Diagnosis.finished(out / entry.name) for entry in request.entries)
        raise KeyboardInterrupt(
            f"{done} of {len(request.entries)} diagnoses are finished and kept; the same command "
            "with --resume runs the rest"
        ) from None
    print(f"report: {folder.path / _PAGE}")
    left_out = () if options.retention_set else blind  # which a note has said
    failed = [e.name for e in request.entries if e.name in folder.failures.keys() - set(left_out)]
    if failed:
        print(
            f"alphatoken: {len(failed)} of {len(request.entries)} diagnostics could not run: "
            f"{', '.join(failed)}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _run_each(request: Request, subject: Subject, folder: _Folder) -> None:
    quiet, count = request.shared.quiet, len(request.entries)
    for number, entry in enumerate(request.entries, start=1):
        if Diagnosis.finished(place := folder.path / entry.name):
            _say(Diagnosis.load(place), folder, "finished earlier")
            continue
        if not quiet:
            print(f"[{number}/{count}] {entry.name}: {entry.question}", file=sys.stderr)
        start = time.monotonic()
        try:
            diagnosis = _diagnosed(request, entry, subject)
        except Exception as error:
            if count == 1 or isinstance(error, OSError) or request.shared.traceback:
                raise
            reason = _reason(error)
            print(f"alphatoken: {entry.name} could not run: {reason}", file=sys.stderr)
            folder.fail(entry.name, reason)
            continue
        folder.keep(diagnosis, time.monotonic() - start)
        _say(diagnosis, folder, f"{time.monotonic() - start:.0f} s")


def _diagnosed(request: Request, entry: Entry, subject: Subject) -> Diagnosis:
    """The largest diagnosis within the budget, or of all sizes where there is none."""
    budget = request.budget
    try:
        return diagnosed_before(
            None if budget is None else time.monotonic() + budget,
            subject,
            request.fixed,
            partial(_one_round, entry, request.options[entry.name]),
            budget=request.shared.budget,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "out of memory",
            got=str(error)[:200],
            remedy="a smaller --per_device_train_batch_size, --tokens or --max_length",
        ) from None


def _one_round(entry: Entry, options: Any, subject: Subject) -> Diagnosis:
    """A diagnosis of these sizes; it does not depend on what ran before it."""
    torch.manual_seed(subject.seed)
    with collected_warnings() as warned:
        diagnosis: Diagnosis = entry.load().diagnose(subject, options)
    more = [sentence for sentence in warned if sentence not in diagnosis.notes]
    return replace(diagnosis, notes=(*diagnosis.notes, *more))


def _reason(error: Exception) -> str:
    """One line; what was not raised on purpose is shown with its traceback on stderr as well."""
    text = " ".join(str(error).split())
    if isinstance(error, AlphaTokenError):
        return text
    traceback.print_exception(error)
    return f"a mistake in this program, {type(error).__name__}: {text}; please report it"


def _say(diagnosis: Diagnosis, folder: _Folder, how_long: str) -> None:
    print(f"{diagnosis.name} ({how_long}): {diagnosis.question}")
    print(f"  {diagnosis.conclusion}")
    print(f"  files: {folder.path / diagnosis.name}", flush=True)


# --- the folder -----------------------------------------------------------------------------------


@dataclass
class _Folder:
    """The results of one run, which may be added to; ``report.html`` shows what is there."""

    path: Path
    prepared: Prepared
    diagnostics: dict[str, dict[str, Any]]  # their options, and the seconds once they have run
    command: str
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, prepared: Prepared, request: Request) -> _Folder:
        """A new run, or an earlier one, which must have the same settings."""
        diagnostics: dict[str, dict[str, Any]] = {}
        manifest = path / _MANIFEST
        if manifest.exists() and request.shared.overwrite_output:
            _clear(path)
        if manifest.exists():
            earlier = read_run(manifest)
            refuse_other_run(earlier["settings"], prepared.settings)
            diagnostics = dict(earlier.get("diagnostics", {}))
        for name, options in request.options.items():
            record = diagnostics.setdefault(name, {"options": asdict(options)})
            then, now = (
                {f"{name}.{key}": value for key, value in each.items()}
                for each in (record["options"], asdict(options))
            )
            refuse_other_run(then, now)
        folder = cls(path, prepared, diagnostics, request.command)
        folder._write()
        return folder

    def keep(self, diagnosis: Diagnosis, seconds: float) -> None:
        """Write a diagnosis, and the page with it."""
        place = self.path / diagnosis.name
        shutil.rmtree(place, ignore_errors=True)  # half of one, of a killed process
        diagnosis.save(place)
        self.diagnostics[diagnosis.name]["seconds"] = round(seconds, 1)
        self._write()

    def fail(self, name: str, reason: str) -> None:
        """Note why there is none."""
        self.failures[name] = reason
        self._write()

    def _write(self) -> None:
        settings = self.prepared.settings
        model = Path(settings["model"])
        document = {
            "command": "diagnose",
            "settings": settings,
            "diagnostics": self.diagnostics,
        }
        write_json(self.path / _MANIFEST, document, default=str)
        shown = [entry for entry in DIAGNOSTICS if entry.name in self.diagnostics]
        finished = [one.name for one in shown if Diagnosis.finished(self.path / one.name)]
        done = {name: Diagnosis.load(self.path / name) for name in finished}
        page = render_page(
            f"How far to trust the values: {'/'.join(model.parts[-2:])}",
            f"{len(done)} of {len(shown)} diagnoses. {LEAD}",
            [
                section_of(
                    entry.name,
                    entry.question,
                    done.get(entry.name),
                    failure=self.failures.get(entry.name, ""),
                    shared=settings,
                )
                for entry in shown
            ],
            contents=True,
            rows=self.prepared.notes,
            settings=settings,
            command=self.command,
        )
        write_text(self.path / _PAGE, page)


def _clear(path: Path) -> None:
    """Remove an earlier run, and nothing else that may lie in the folder."""
    for entry in DIAGNOSTICS:
        shutil.rmtree(path / entry.name, ignore_errors=True)
    for name in (_PAGE, _MANIFEST):
        (path / name).unlink(missing_ok=True)
