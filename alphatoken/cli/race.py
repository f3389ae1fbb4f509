"""``alphatoken race``: a race of runs of ``sft`` or ``dpo``, and the winner's run to its end.

An arm is the command line with the words of the arm behind it: what one may say of a run, one may
say of an arm, and recipes give way to it as they do to what is typed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from alphatoken.cli import training
from alphatoken.cli.program import HELP_ALL
from alphatoken.cli.recipes import recipes_of
from alphatoken.cli.training_options import RACE_FILES, missing_files
from alphatoken.errors import ConfigError
from alphatoken.presets import values_in_words
from alphatoken.race.arms import ALL, Arm, read_arms
from alphatoken.support.progress import is_first_process
from alphatoken.support.storage import no_empty_folder, open_line, read_json


def run(words: Sequence[str]) -> int:
    """Run the race, and the winner to its end.

    Raises:
        AlphaTokenError: what cannot be honoured, before any work.
    """
    if {"--help", "-h", HELP_ALL} & set(words):
        print(training.help_text("race", words))
        return 0
    command = "dpo" if _is_of_pairs(words) else "sft"
    configuration, kind = training.trainer_of(command, words)
    from alphatoken.cli.arguments import (
        named_options,
        read_arguments,
        without_unread_rows,
        words_of,
    )
    from alphatoken.cli.training_rows import check_rows
    from alphatoken.train.refusals import raise_first

    def read(*over: str) -> Any:
        return read_arguments(command, words, configuration, race=True, over=over)

    arguments = read()
    if arguments.model.model_name_or_path is None:
        raise ConfigError("no model is named", remedy="--model_name_or_path FOLDER_OR_HUB_NAME")
    raise_first(_refused(arguments, named_options(words)))
    arms = read_arms(arguments.race.arms)
    # Whatever one arm cannot have is said before any work, and so is what rows cannot give it.
    by_arm = {arm.name: read(*words_of(arm.options)) for arm in arms}
    raise_first(_refused_arms(by_arm))
    _require_read_value(words, arguments.run.value, by_arm)
    own = set.intersection(*({*arm.options} for arm in arms if arm.name != ALL))
    if typed := sorted(own & named_options(words)):
        _say(f"no arm reads {', '.join(f'--{name}' for name in typed)}: each has its own")
    reads_fisher = _reader(by_arm).training.reads_fisher
    by_arm = {n: without_unread_rows(own, reads_fisher, True) for n, own in by_arm.items()}
    for own in by_arm.values():
        check_rows(own, reads_fisher=reads_fisher)
    for name, own in by_arm.items():
        if own.training.needs_values:
            _say(f"{name}: values: {values_in_words(own.training)}")
    raise_first(_refused_second(arguments))
    training.check_output(arguments)
    training.check_launch(arguments)
    training.clear_output(arguments)
    _clear_race(arguments)
    with no_empty_folder(arguments.training.output_dir):
        _Command(read, arguments, by_arm, kind).run()
    return 0


def _is_of_pairs(words: Sequence[str]) -> bool:
    """Whether the run is that of ``dpo``: by its flag, however it is written, or by a recipe."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dpo", nargs="?", const=True)
    said = parser.parse_known_args(list(words))[0].dpo
    for recipe in recipes_of(words) if said is None else ():
        said = recipe.options.get("dpo", said)
    return str(said).lower() in ("true", "t", "yes", "y", "1")


def _refused(arguments: Any, typed: Collection[str]) -> Iterator[ConfigError]:
    from alphatoken.race.runner import refused_races

    yield from refused_races(arguments.training)
    race = arguments.race
    if race.choosing_file is not None and "choosing_rows" in typed and race.choosing_rows:
        yield ConfigError(
            "--choosing_rows has no effect beside --choosing_file",
            got=f"--choosing_rows {race.choosing_rows}, --choosing_file {race.choosing_file}",
            why="nothing is set aside of the validation rows, and all rows of the file choose",
            remedy="one of the two",
        )
    yield from missing_files({name: getattr(arguments.race, name) for name in RACE_FILES})


def _reader(by_arm: Mapping[str, Any]) -> Any:
    """The arm by whose options rows are read: one that values tokens, by a Fisher if any does."""
    arms = (own for name, own in by_arm.items() if name != ALL)
    return max(arms, key=lambda own: (own.training.needs_values, own.training.reads_fisher))


def _refused_arms(by_arm: Mapping[str, Any]) -> Iterator[ConfigError]:
    from alphatoken.cli.training_rows import held_out

    drawn = {name: held_out([own]) for name, own in by_arm.items() if own.training.needs_values}
    counts = {name: tuple(number or 0 for number in own) for name, own in drawn.items()}
    if len(kinds := list(dict.fromkeys(counts.values()))) < 2:
        return
    first, other = (next(n for n, own in counts.items() if own == kind) for kind in kinds[:2])
    yield ConfigError(
        "the arms of a race need other rows held out",
        got=f"{kinds[0][0]} validation rows and {kinds[0][1]} prompts of a Fisher for '{first}', "
        f"{kinds[1][0]} and {kinds[1][1]} for '{other}', all drawn from the training rows",
        why="all arms train on the same rows, those that one of them would train on alone",
        remedy="rows of their own: --validation_file FILE, --fisher_data FILE or --fisher_file "
        "FILE; or the same objective and retention for all arms that value tokens",
    )


def _require_read_value(words: Sequence[str], value: str | None, by_arm: Mapping[str, Any]) -> None:
    """Check that an arm values tokens as ``--value`` says, where it is typed.

    Raises:
        ConfigError: none does.
    """
    valued = [own for own in by_arm.values() if own.training.needs_values]
    typed = any(word.split("=")[0] == "--value" for word in words)
    if typed and not any(own.run.value == value for own in valued):
        raise ConfigError(
            "no arm reads --value",
            got=f"--value {value}, --arms {' '.join(name for name in by_arm if name != ALL)}",
            why="an arm of its own estimator values tokens by that one",
            remedy=f"--arms {value}-80, or leave one of the two out",
        )


def _refused_second(arguments: Any) -> Iterator[ConfigError]:
    """A race in a folder where one has ended: its verdict can be had without another."""
    from alphatoken.race.runner import STATE

    run, path = arguments.run, Path(arguments.training.output_dir) / STATE
    if run.resume or run.overwrite_output or not is_first_process():
        return
    ended = (read_json(path) or {}).get("outcome") or {}
    if winner := ended.get("winner"):
        yield ConfigError(
            "the output folder holds a race that has ended",
            got=f"'{winner}' won: {path}",
            why="two races would be mixed in it",
            remedy="--resume shows its verdict again, and trains the winner on where that has not "
            "ended; --overwrite_output starts anew (its checkpoints are removed); or another "
            "--output_dir",
        )


def _clear_race(arguments: Any) -> None:
    """Remove an earlier race under ``--overwrite_output``."""
    if arguments.run.overwrite_output and is_first_process():
        from alphatoken.race.runner import ARMS, STATE

        folder = Path(arguments.training.output_dir)
        (folder / STATE).unlink(missing_ok=True)
        shutil.rmtree(folder / ARMS, ignore_errors=True)


def _say(line: str) -> None:
    if is_first_process():
        print(f"note: {line}", file=sys.stderr, flush=True)


class _Command:
    """One race: rows read once, and a trainer for each arm whenever it runs."""

    def __init__(
        self, read: Any, arguments: Any, by_arm: Mapping[str, Any], kind: type[Any]
    ) -> None:
        from alphatoken.race.rows import set_aside
        from alphatoken.race.runner import check_arms, reads_weights
        from alphatoken.train.python_rows import without_weights

        self._read, self._arguments, self._by_arm, self._kind = read, arguments, by_arm, kind
        arms = [own for name, own in by_arm.items() if name != ALL]
        self._tokenizer, datasets, self._notes = training.load_data(_reader(by_arm), arms)
        self._entries = datasets.pop("train_entries", [])
        configurations = {name: own.training for name, own in by_arm.items()}
        self._weighed = reads_weights(configurations)
        self._unweighted = datasets["train_dataset"]
        if self._weighed:
            self._unweighted = without_weights(self._unweighted)
        split = None
        if arguments.race.choosing_file is None:
            split = partial(set_aside, wanted=arguments.race.choosing_rows)
        check_arms(configurations, datasets, split)
        rows = {"choosing": datasets.pop("choosing_dataset")}
        if "watched_dataset" in datasets:
            rows["retention"] = datasets.pop("watched_dataset")
        self._datasets, self._rows = datasets, rows
        for arm in read_arms(arguments.race.arms):
            rows, _ = self._train_rows(arm)  # none is refused when others have been trained
            if arm.leaves_rows_out:
                _say(f"{arm.name}: on {len(rows)} of {len(self._unweighted)} training rows")

    def _check_looks(self, rows: int) -> None:
        """Refuse a run that is over before its looks, where its rows say so without a model."""
        from alphatoken.race.arms import looks_of
        from alphatoken.train.steps import Schedule

        arguments, args = self._arguments, self._arguments.training
        if arguments.run.resume or getattr(args, "packing", False):
            return  # its state says how long it is; rows are packed by a trainer
        run = Schedule.of(args, rows, args.world_size)
        before = shlex.join(["alphatoken", "race", *arguments.words])
        looks_of(run.steps, arguments.race.looks, partial(run.in_words, before=before))

    def run(self) -> None:
        """The race, then the winner's run."""
        from alphatoken.race.page import PAGE, cost, verdict, write_race_page
        from alphatoken.race.runner import Race

        for note in self._notes:
            _say(note)
        self._say_unread()
        folder, command = Path(self._arguments.training.output_dir), self._going_on()
        race = Race(
            self._make,
            self._arguments.race,
            self._rows,
            folder,
            say=_say,
            shown=lambda result: write_race_page(folder / PAGE, result, command),
        )
        self._check_looks(len(self._datasets["train_dataset"]))
        try:
            result = race.run(resume=self._arguments.run.resume)
        except KeyboardInterrupt:
            instead = " in place of --overwrite_output"
            raise KeyboardInterrupt(
                "the same command with --resume"
                f"{instead if self._arguments.run.overwrite_output else ''} goes on with the race"
            ) from None
        if is_first_process():
            page = f"page: {folder / PAGE}\n{open_line(folder / PAGE)}"
            print(f"{verdict(result)}\n{cost(result)}\n{page}", flush=True)
        if self._arguments.race.stop_after_looks:
            if is_first_process():
                print(f"next: {command}", flush=True)
            return
        arguments = self._by_arm[result.winner]
        training.train(arguments, race.winner(result), [], arm=result.winner)
        if is_first_process():
            alone = self._alone(race.arms[result.winner], result.state.steps)
            write_race_page(folder / PAGE, result, alone, trained=True)
            if alone:
                print(f"to train this way without a race: {alone}", flush=True)

    def _alone(self, arm: Arm, steps: int) -> str:
        """The command that trains as an arm does; read anew, as trainers change what they get."""
        from alphatoken.cli.arguments import without_unread_rows, words_of
        from alphatoken.cli.without_race import command_of_arm

        own = self._read(*words_of(arm.options))
        args = own.training
        return command_of_arm(
            without_unread_rows(own, args.reads_fisher, args.reads_retention), arm, steps
        )

    def _going_on(self) -> str:
        words = [w for w in self._arguments.words if w not in ("--stop_after_looks", "--resume")]
        words = [word for word in words if word != "--overwrite_output"]
        return shlex.join(["alphatoken", "race", *words, "--resume"])

    def _say_unread(self) -> None:
        for name, own in self._by_arm.items():
            for option in training.changed_options(own):
                value = getattr(own.training, option, None)
                _say(f"{name}: {option} of the run gives way to this arm: it is {value!r} there")

    def _make(self, arm: Arm, folder: Path) -> Any:
        from alphatoken.cli.arguments import words_of
        from alphatoken.race.runner import datasets_of, options_in

        arguments, args = self._by_arm[arm.name], self._arguments.training
        if own := options_in(folder, args):
            arguments = self._read(*words_of({**arm.options, **own}))
        train, places = self._train_rows(arm)
        datasets = datasets_of(arguments.training, self._datasets)
        datasets |= {"train_dataset": train, "train_places": places}
        return training.make_trainer(arguments, self._kind, self._tokenizer, datasets)

    def _train_rows(self, arm: Arm) -> tuple[Any, list[str]]:
        """The training rows of an arm, and where a person finds each."""
        from alphatoken.data.source import number_of
        from alphatoken.race.rows import rows_of_arm, take

        weighed, places = arm.name in self._weighed, self._datasets["train_places"]
        rows = self._datasets["train_dataset"] if weighed else self._unweighted
        if not arm.leaves_rows_out:
            return rows, places
        entries = [one[arm.without[0]] for one in self._entries] if arm.without else []
        kept = rows_of_arm(arm, entries, [number_of(place) for place in places])
        return take(rows, kept), [places[number] for number in kept]
