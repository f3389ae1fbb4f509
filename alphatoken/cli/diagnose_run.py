"""Run of diagnostics: finished ones are kept, and one that cannot run says why."""

from __future__ import annotations

import random
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken import FisherDrift
from alphatoken.cli.diagnose_options import PROMPTS, DiagnoseOptions, entries_of, read_request
from alphatoken.cli.held_apart import take_apart
from alphatoken.config import WALK
from alphatoken.data import EncodeOptions, Example, Fields, Pools, Row, read_rows, split_pools
from alphatoken.data.encode import about_encoding
from alphatoken.data.split import about_pools, check_draw, refuse_one_file
from alphatoken.diagnose import DIAGNOSTICS, SIZES, Entry, find
from alphatoken.diagnose.clouds import require_sklearn
from alphatoken.diagnose.diagnosis import LEAD, Diagnosis, overall, section_of
from alphatoken.diagnose.statistics import FEWEST
from alphatoken.diagnose.subject import Subject, diagnosed_before, require_retention
from alphatoken.errors import (
    AlphaTokenError,
    ConfigError,
    DataError,
    ModelError,
    collected_warnings,
    counted,
)
from alphatoken.presets import values_in_words
from alphatoken.score.job import encode_some, examples_digest
from alphatoken.score.page import render_page
from alphatoken.select.masks import keep_count
from alphatoken.support.progress import shown_progress
from alphatoken.support.resume import (
    check_output_folder,
    command_of,
    file_digest,
    read_run,
    refuse_other_run,
    require_writable,
    weights_digest,
)
from alphatoken.support.storage import open_line, write_json, write_text

TRAINERS_LENGTH = 1024
"""Tokens of a row at which TRL's trainers cut where no option says otherwise."""
VALIDATION_ROWS = 32
"""Most rows of a validation file that are used where no number is given."""

_FIELDS = ("prompt", "response", "messages")
_SAME = (*SIZES, "tuning_rate", "seed")
"""Options that a subject has by the same name; left out, its own defaults hold."""

_MANIFEST, _PAGE = "run.json", "report.html"
_BESIDE_VALUES = "diagnosis"
"""The folder of the diagnoses in one that ``score`` wrote, which has a manifest and a page too."""


def run(words: Sequence[str]) -> int:
    """Run what ``words`` ask for and is not finished yet; the exit status.

    Raises:
        AlphaTokenError: wrong input, or the one diagnostic asked for cannot run.
        KeyboardInterrupt: says how to go on.
    """
    options, own = read_request(*words)
    entries = entries_of(words[0])
    if find_spec("matplotlib") is None:
        raise ConfigError("diagnoses need matplotlib", remedy="pip install 'alphatoken[diagnose]'")
    if any(entry.needs_sklearn for entry in entries):
        require_sklearn()
    check_files(options)
    lacking = {entry.name: flag for entry in entries if (flag := options.lacks(entry))}
    if len(entries) == 1:
        _require_files(entries[0], options)
    for flag in dict.fromkeys(lacking.values()):
        names = ", ".join(name for name, one in lacking.items() if one == flag)
        print(f"note: {names} will not run without {flag}", file=sys.stderr)
    out = Path(options.output_dir)
    if command_of(out / _MANIFEST) == "score":
        out /= _BESIDE_VALUES
        print(f"note: the folder holds values; the diagnoses go to {out}", file=sys.stderr)
    require_writable(out)
    check_output_folder(
        out / _MANIFEST,
        [out / entry.name for entry in DIAGNOSTICS],
        "diagnose",
        resume=options.resume,
        overwrite=options.overwrite_output,
    )
    if not options.quiet:
        print(f"note: values: {values_in_words(options)}", file=sys.stderr)
    try:
        subject, settings, notes = prepare(options)
        for note in () if options.quiet else notes:
            print(f"note: {note}", file=sys.stderr)
        if len(entries) == 1 and (check := getattr(entries[0].load(), "require_rows", None)):
            left_out = check(subject)  # before anything is written
            for note in () if options.quiet else left_out:
                print(f"note: {note}", file=sys.stderr)
        if options.overwrite_output:
            _remove_earlier(out)
        command = shlex.join(["alphatoken", "diagnose", *words])
        folder = _Folder.open(out, settings, notes, own, command)
        with shown_progress(not options.quiet):
            _run_each(options, own, subject, folder)
    except KeyboardInterrupt:
        done = sum(Diagnosis.finished(out / entry.name) for entry in entries)
        raise KeyboardInterrupt(
            f"{done} of {len(entries)} diagnoses are finished and kept; the same command "
            "with --resume runs the rest"
        ) from None
    print(f"report: {folder.path / _PAGE}\n{open_line(folder.path / _PAGE)}")
    # Of those that lack a file a note has said so.
    failed = [e.name for e in entries if e.name in folder.failures.keys() - lacking.keys()]
    if failed:
        print(
            f"alphatoken: {len(failed)} of {len(entries)} diagnostics could not run: "
            f"{', '.join(failed)}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _require_files(entry: Entry, options: DiagnoseOptions) -> None:
    """Check that the diagnostic has the rows that it cannot do without.

    Raises:
        DataError: it has not.
    """
    if entry.needs_retention:
        require_retention(options.retention_set)
    if entry.needs_trusted:
        held_out = {"--validation_file": options.validation_file}
        refuse_one_file(options.train_file, held_out, drawn=False)
    if options.lacks(entry):
        raise DataError(
            "this diagnostic needs rows that are trusted",
            got="validation rows that are drawn from the training rows"
            if options.validation_rows
            else "none",
            why="it compares the training rows with them, and rows of one file do not differ",
            remedy="--validation_file FILE",
        )


def _run_each(
    options: DiagnoseOptions, own: Mapping[str, Any], subject: Subject, folder: _Folder
) -> None:
    for number, entry in enumerate(map(find, own), start=1):
        if Diagnosis.finished(place := folder.path / entry.name):
            _say(Diagnosis.load(place), folder, "finished earlier")
            continue
        if not options.quiet:
            print(f"[{number}/{len(own)}] {entry.name}: {entry.question}", file=sys.stderr)
        start = time.monotonic()
        try:
            _require_files(entry, options)
            own_subject = subject.resized(folder=place)
            diagnosis = _diagnosed(options, entry, own[entry.name], own_subject)
        except Exception as error:
            if len(own) == 1 or isinstance(error, OSError) or options.traceback:
                raise
            reason = _reason(error)
            print(f"alphatoken: {entry.name} could not run: {reason}", file=sys.stderr)
            folder.fail(entry.name, reason)
            continue
        folder.keep(diagnosis, time.monotonic() - start)
        _say(diagnosis, folder, f"{time.monotonic() - start:.0f} s")


def _diagnosed(options: DiagnoseOptions, entry: Entry, own: Any, subject: Subject) -> Diagnosis:
    """The largest diagnosis within the budget, or of all sizes where there is none."""
    seconds = options.seconds if entry.rounds else None
    try:
        return diagnosed_before(
            None if seconds is None else time.monotonic() + seconds,
            subject,
            options.fixed,
            partial(_one_round, entry, own),
            budget=options.budget,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "out of memory",
            got=str(error)[:200],
            remedy="a smaller --per_device_train_batch_size, --tokens or --max_length",
        ) from None


def _one_round(entry: Entry, options: Any, subject: Subject) -> Diagnosis:
    """A diagnosis of these sizes; it does not depend on what ran before it.

    Raises:
        ConfigError: it has the name of another diagnostic.
    """
    torch.manual_seed(subject.seed)
    with collected_warnings() as warned:
        diagnosis: Diagnosis = entry.load().diagnose(subject, options)
    if diagnosis.name != entry.name:
        raise ConfigError(
            "a diagnostic gave a result under the name of another one",
            got=f"'{diagnosis.name}' from '{entry.name}', in {entry.load().__name__}",
            why="folder and page are those of the name",
            remedy=f"conclude({entry.name!r}, ...) in that file",
        )
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
    if diagnosis.next_command:
        print(f"  next: {diagnosis.next_command}")
    if diagnosis.next_time:
        print(f"  it takes {diagnosis.next_time} at the speed of this walk")
    print(f"  files: {folder.path / diagnosis.name}", flush=True)


# --- the folder -----------------------------------------------------------------------------------


def _remove_earlier(path: Path) -> None:
    """Remove an earlier run, and nothing else that may lie in the folder."""
    if (path / _MANIFEST).exists():
        for entry in DIAGNOSTICS:
            shutil.rmtree(path / entry.name, ignore_errors=True)
        for name in (_PAGE, _MANIFEST):
            (path / name).unlink(missing_ok=True)


@dataclass
class _Folder:
    """The results of one run, which may be added to; ``report.html`` shows what is there."""

    path: Path
    settings: dict[str, Any]
    notes: list[str]
    diagnostics: dict[str, dict[str, Any]]  # their options, and the seconds once they have run
    command: str
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        path: Path,
        settings: dict[str, Any],
        notes: list[str],
        own: Mapping[str, Any],
        command: str,
    ) -> _Folder:
        """A new run, or an earlier one, which must have the same settings.

        ``own`` are the options of each diagnostic to run, by its name.
        """
        diagnostics: dict[str, dict[str, Any]] = {}
        manifest = path / _MANIFEST
        if manifest.exists():
            earlier = read_run(manifest)
            refuse_other_run(earlier["settings"], settings)
            diagnostics = dict(earlier.get("diagnostics", {}))
        for name, options in own.items():
            record = diagnostics.setdefault(name, {"options": asdict(options)})
            then, now = (
                {f"{name}.{key}": value for key, value in each.items()}
                for each in (record["options"], asdict(options))
            )
            refuse_other_run(then, now)
        folder = cls(path, settings, notes, diagnostics, command)
        path.mkdir(parents=True, exist_ok=True)
        folder._write()
        return folder

    def keep(self, diagnosis: Diagnosis, seconds: float) -> None:
        """Write a diagnosis, and the page with it."""
        place = self.path / diagnosis.name
        for half in place.glob("*"):  # of a killed process; folders hold finished parts
            if half.is_file():
                half.unlink()
        diagnosis.save(place)
        self.diagnostics[diagnosis.name]["seconds"] = round(seconds, 1)
        self._write()

    def fail(self, name: str, reason: str) -> None:
        """Note why there is none."""
        self.failures[name] = reason
        self._write()

    def _write(self) -> None:
        settings, model = self.settings, Path(self.settings["model"])
        document = {"command": "diagnose", "settings": settings, "diagnostics": self.diagnostics}
        write_json(self.path / _MANIFEST, document, default=str)
        shown = [entry for entry in DIAGNOSTICS if entry.name in self.diagnostics]
        finished = [one.name for one in shown if Diagnosis.finished(self.path / one.name)]
        done = {name: Diagnosis.load(self.path / name) for name in finished}
        of, alone = "/".join(model.parts[-2:]), len(shown) == 1
        title = shown[0].question if alone else f"How far to trust the values: {of}"
        lead = f"{overall(list(done.values()))} {LEAD}".strip()
        if len(done) < len(shown):
            lead = f"{len(done)} of {len(shown)} diagnoses so far. {lead}"
        if alone:
            lead = f"Asked of {of}. {shown[0].lead or LEAD}"
        sections = [
            section_of(
                entry.name,
                entry.question,
                done.get(entry.name),
                failure=self.failures.get(entry.name, ""),
                shared=settings,
            )
            for entry in shown
        ]
        if alone:  # the question is the title of the page
            sections = [replace(sections[0], title="Answer", name="")]
        page = render_page(
            title,
            lead,
            sections,
            contents=not alone,
            rows=self.notes,
            settings=settings,
            command=self.command,
        )
        write_text(self.path / _PAGE, page)


# --- what is diagnosed ----------------------------------------------------------------------------


def retention_files(texts: Sequence[str]) -> dict[str, tuple[str, Fields]]:
    """``[NAME=]FILE[,prompt=FIELD][,response=FIELD][,messages=FIELD]``: name -> file, its fields.

    A set without a name is called as its file.

    Raises:
        ConfigError: an unknown part, or a name twice.
    """
    files: dict[str, tuple[str, Fields]] = {}
    for text in texts:
        whole = Path(text).is_file()  # whatever its name looks like
        path, *parts = [text] if whole else text.split(",")
        name, equals, rest = path.partition("=")
        if whole or not equals or "/" in name:
            name, rest = Path(path).stem, path
        columns = dict(part.partition("=")[::2] for part in parts)
        if not set(columns) <= set(_FIELDS) or not all(columns.values()) or name in files:
            raise ConfigError(
                "--retention_set cannot be read",
                got=f"{text!r}{' has the name of another' if name in files else ''}",
                remedy="[NAME=]FILE[,prompt=FIELD][,response=FIELD] or [NAME=]FILE,messages=FIELD",
            )
        prompt, response, messages = map(columns.get, _FIELDS)
        files[name] = rest, Fields(prompt, response, messages)
    return files


def beside_models(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=MODEL`` texts as name -> model.

    Raises:
        ConfigError: one cannot be read, or a name twice.
    """
    models: dict[str, str] = {}
    for text in texts:
        name, equals, model = text.partition("=")
        if not (name and equals and model) or "/" in name or name in models:
            raise ConfigError(
                "--beside cannot be read",
                got=repr(text),
                why="tables and figures call each model by a name of its own",
                remedy="--beside NAME=MODEL, each with another name",
            )
        models[name] = model
    return models


def check_files(options: DiagnoseOptions) -> None:
    """Check that each named file exists and each number has a meaning, before loading anything.

    Raises:
        DataError: one is not. ConfigError: no validation rows at all, a bad number.
    """
    if options.validation_file is None and options.validation_rows is None:
        raise ConfigError(
            "there are no validation rows",
            why="values are measured against them",
            remedy="--validation_file FILE, or --validation_rows N to draw them from the training "
            "rows",
        )
    keep_count(options.ratio, 1, name="--keep_ratio")  # its own error
    _ = options.scorer_config()  # its own error
    beside_models(options.beside)
    named = [("training", options.train_file), ("validation", options.validation_file)]
    sets = retention_files(options.retention_set)
    named += [(f"retention ({name})", path) for name, (path, _) in sets.items()]
    named.append(("Fisher", options.fisher_file))
    for what, path in named:
        if path is not None and not Path(path).exists():
            raise DataError(f"there is no {what} file", got=path, remedy="check the path")


def prepare(options: DiagnoseOptions) -> tuple[Subject, dict[str, Any], list[str]]:
    """Read rows, load models, encode: everything that the diagnostics look at.

    Returns:
        The subject, what its numbers depend on, and what a reader must know of the rows.

    Raises:
        AlphaTokenError: wrong input, with what and where.
    """
    config = options.scorer_config()
    tokenizer = options.tokenizer()
    fisher = None if options.fisher_file is None else FisherDrift.load(options.fisher_file)
    pools, retention, notes = _read(options, fisher)
    how = options.within(options.how, options.layers)

    def encode(rows: Sequence[Row], what: str, how: EncodeOptions) -> list[Example]:
        examples, report = encode_some(rows, tokenizer, how, what)
        notes.extend(about_encoding(what, report))
        return examples

    train = encode(pools.train, "training", how)
    validation = encode(pools.validation, "validation", how)
    how = replace(how, on_empty="skip")  # of the others such rows are counted, never an error
    held_out = encode(pools.fisher, "Fisher prompts", how) if pools.fisher else []
    retention_examples = {n: encode(rows, f"retention ({n})", how) for n, rows in retention.items()}
    measured = [*validation, *held_out, *chain.from_iterable(retention_examples.values())]
    # By their texts they are apart already.
    notes += take_apart(measured, "a held-out row", {"training": train}, options.leak_key)
    model = options.model()
    before, beside = options.reference, beside_models(options.beside)
    reference = None if before is None else _other(model, options, before, "--reference")
    digests = {  # each is loaded once for this
        f"beside_sha256, {name}": weights_digest(_other(model, options, path, f"--beside {name}"))
        for name, path in beside.items()
    }
    names = {
        "model": options.model_name_or_path,
        "train": options.train_file,
        "validation": options.validation_file or "rows of the training file",
        "adapter": options.adapter,
        "reference": options.reference,
        "fisher": options.fisher_file,
    }
    subject = Subject(
        model=model,
        train=train,
        validation=validation,
        retention=retention_examples,
        prompts=held_out,
        tokenizer=tokenizer,
        reference=reference,
        beside={name: options.other(path).model for name, path in beside.items()},
        fisher=fisher,
        config=config,
        ratio=options.ratio,
        batch_size=options.per_device_train_batch_size,
        **{name: value for name in _SAME if (value := getattr(options, name)) is not None},
        progress=not options.quiet,
        names={key: name for key, name in names.items() if name is not None},
        words=_words(options, how.max_length),
    )
    return subject, _settings(subject, options) | digests, notes


def _words(options: DiagnoseOptions, longest: int | None) -> str:
    """Options that name model and rows; with the length where the trainers' would be longer."""
    shorter = options.max_length is None and longest is not None and longest < TRAINERS_LENGTH
    return options.words + f" --max_length {longest}" * (shorter and bool(options.words))


# --- rows -----------------------------------------------------------------------------------------


def _read(
    options: DiagnoseOptions, fisher: FisherDrift | None
) -> tuple[Pools, dict[str, list[Row]], list[str]]:
    """Pools that share nothing; retention rows by set; sentences on what was drawn and removed."""
    notes: list[str] = []
    drawn = partial(_drawn, seed=options.seed, notes=notes)
    data = options.read_rows(options.train_file, limit=options.train_limit)
    validation = None
    if options.validation_file is not None:
        # By the named columns where a row has them, else by those that are known.
        validation = options.read_rows(options.validation_file, optional=True)
        most = options.validation_rows or VALIDATION_ROWS
        validation = drawn(validation, most, "validation rows", "--validation_rows")
    retention = {
        name: drawn(
            read_rows(path, fields=named),
            options.retention_rows,
            f"retention rows of {name}",
            "--retention_rows",
        )
        for name, (path, named) in retention_files(options.retention_set).items()
    }
    try:
        pools = split_pools(
            data,
            validation=validation,
            validation_rows=0 if validation is not None else options.validation_rows or 0,
            fisher=[row for rows in retention.values() for row in rows],
            fisher_keys=[] if fisher is None else list(fisher.metadata.get("row_keys", [])),
            leak_key=options.leak_key,
            seed=options.seed,
        )
    except DataError:  # of one file, a better one; a large file is fine, since few rows are drawn
        refuse_one_file(options.train_file, {"--validation_file": options.validation_file})
        raise
    kept = {id(row) for row in pools.fisher}
    retention = {name: [row for row in rows if id(row) in kept] for name, rows in retention.items()}
    notes += about_pools(pools.counts, places=pools.places)
    pools = _held_out(pools, options, notes)
    train = drawn(pools.train, options.train_rows, "training rows", "--train_rows")
    return replace(pools, train=train), retention, notes


def _held_out(pools: Pools, options: DiagnoseOptions, notes: list[str]) -> Pools:
    """The same pools with rows drawn from the training rows for a Fisher, in ``fisher``."""
    count = options.fisher_prompts
    if count is None:
        fifth = len(pools.train) // 5
        count = min(PROMPTS, fifth) if fifth >= FEWEST else 0
    fewer = "--fisher_prompts N for fewer (0 fits Fishers on the training rows themselves)"
    check_draw(count, len(pools.train), "Fisher prompts", fewer)
    drawn = split_pools(
        pools.train, fisher_rows=count, leak_key=options.leak_key, seed=options.seed
    )
    if count:
        notes.append(
            counted(count, "training rows were held out for fitting Fishers ")
            + "(--fisher_prompts N for another number)."
        )
        notes += about_pools(drawn.counts, places=drawn.places)
    return replace(pools, train=drawn.train, fisher=drawn.fisher)


def _drawn(
    rows: list[Row], most: int, what: str, flag: str, *, seed: int, notes: list[str]
) -> list[Row]:
    """Draw at most so many rows at random, in their own order, with a note."""
    if len(rows) <= most:
        return rows
    chosen = sorted(random.Random(seed).sample(range(len(rows)), most))
    notes.append(f"{most} of {len(rows)} {what} were drawn ({flag} N for another number).")
    return [rows[index] for index in chosen]


# --- models ---------------------------------------------------------------------------------------


def _other(model: nn.Module, options: DiagnoseOptions, path: str, flag: str) -> nn.Module:
    """A model beside the first, which must have the same weights by name and shape."""
    other = options.other(path).model()
    ours, theirs = (
        {name: tuple(p.shape) for name, p in one.named_parameters()} for one in (model, other)
    )
    if options.adapter is None and ours != theirs:
        name = next(n for n in (*ours, *theirs) if ours.get(n) != theirs.get(n))
        raise ConfigError(
            f"{flag} is another kind of model",
            got=f"{name}: {ours.get(name)} in the model, {theirs.get(name)} in the other",
            why="models are compared state by state and weight by weight",
            remedy="give models that one fine-tuning began with or ended in",
        )
    return other


def _settings(subject: Subject, options: DiagnoseOptions) -> dict[str, Any]:
    """Settings on which the numbers depend, by name; a resumed run must have the same."""
    reference, fisher, config = subject.reference, options.fisher_file, subject.config
    of_walks = ("walk_steps", "walk_learning_rate") if config.estimator == WALK else ()
    return {
        **subject.settings(),
        **{name: getattr(config, name) for name in of_walks},
        "batch_size": subject.batch_size,
        **{name: getattr(subject, name) for name in SIZES},
        "tuning_rate": subject.rate,
        "device": str(subject.device),
        "max_length": options.max_length,
        "model_sha256": weights_digest(subject.model),
        "reference_sha256": "none" if reference is None else weights_digest(reference),
        "fisher_sha256": "none" if fisher is None else file_digest(fisher),
        "train_sha256": examples_digest(subject.train),
        "validation_sha256": examples_digest(subject.validation),
        "prompts_sha256": examples_digest(subject.prompts),
        **{
            f"retention_sha256, {name}": examples_digest(rows)
            for name, rows in subject.retention.items()
        },
    }  # fmt: skip
