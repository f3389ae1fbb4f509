"""The runs of a race: each arm trains to a look and is measured there, and the winner goes on.

An arm is an ordinary run of a trainer with the whole run's schedule, in ``output_dir/arms/NAME``. A
callback measures it at the step of a look, saves a checkpoint, and stops it; ``train`` goes on from
that checkpoint at the next look. Arms run one after the other, so that memory is that of one run.
When one has won, its checkpoints are moved into ``output_dir``, and it goes on there as any run
does.

Exact: the winner ends with the bits of the same run without a race, by the same property as a run
that was killed and resumed (``train.checkpoint``). A race that was killed goes on from
``race.json``, which is written whole each time an arm has been measured, before the arm's
checkpoint.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from alphatoken.direction.objective import objective_value
from alphatoken.errors import (
    AlphaTokenError,
    ConfigError,
    DataError,
    NumericalError,
    UnsupportedError,
)
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.race.arms import ALL, CACHES, EARLIEST, Arm, looks_of, read_arms
from alphatoken.race.decision import Column, Outcome, check_rows, decide
from alphatoken.race.options import RaceConfig
from alphatoken.race.rows import counted_rows, prompt_numbers
from alphatoken.support.progress import is_first_process
from alphatoken.support.resume import (
    adapter_settings,
    changed_settings,
    refuse_changes,
    refuse_other_run,
)
from alphatoken.support.storage import flush, read_json, write_json
from alphatoken.train.distributed import Ranks, cache_folder, layout
from alphatoken.train.manifest import (
    RUN,
    checkpoints,
    dataset_digest,
    split_changes,
    weights_fingerprint,
)
from alphatoken.train.policies import chosen_policy
from alphatoken.train.refusals import (
    enough_rows,
    pool_of,
    pool_remedies,
    raise_first,
    refused_datasets,
)
from alphatoken.train.steps import Schedule, steps_of

STATE, ARMS = "race.json", "arms"
"""The state of a race, and the folder of its arms, in ``output_dir``."""

NATS_A_TOKEN = "nats a token"
"""Unit of the losses of rows; of pairs it is another."""

Make = Callable[[Arm, Path], Any]
"""(arm, output folder) -> a new trainer of the run with the options of that arm."""


@dataclass
class RaceState:
    """What ``race.json`` holds, beside what follows from it.

    Attributes:
        settings: what a race that goes on must have in common with the one that began.
        tokens: column ("choosing", "retention") -> response tokens of each row; 1 for each pair;
            empty until an arm has been measured.
        groups: column -> number of the prompt of each row.
        losses: step of a look -> arm -> column -> loss of each row, in its ``unit``.
        failures: arm -> why its training ended before a look.
        seconds: arm -> time that it took up to the last look.
        before: column -> loss of each row before training, which decides nothing; empty until the
            first arm begins.
    """

    settings: dict[str, Any]
    tokens: dict[str, list[float]] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)
    losses: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    before: dict[str, list[float]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return int(self.settings["steps"])

    @property
    def unit(self) -> str:
        """Unit of losses and differences: "nats a token", or "nats a pair" of DPO's loss."""
        return str(self.settings.get("unit", NATS_A_TOKEN))

    @property
    def looks(self) -> tuple[int, ...]:
        """Steps of the looks."""
        return tuple(self.settings["looks"])

    @property
    def steps_taken(self) -> dict[str, int]:
        """Steps of each arm up to the last look that it was measured at."""
        by_arm = dict.fromkeys(self.settings["arms"], 0)
        for step in self.looks:
            by_arm |= dict.fromkeys(self.losses.get(str(step), {}), step)
        return by_arm

    def seconds_left(self, arms: Collection[str], *, to_end: bool) -> float:
        """Seconds that the race still takes, if none of these arms leaves and the slowest wins.

            sum over arms a of (L - k_a) t_a,  and to the end  + (S - L) max over a of t_a

        ``L`` is the last look, ``S`` the steps of the run. Arm a has taken ``k_a`` steps, of
        ``t_a`` seconds each; one that has not begun counts as the slowest that has.
        """
        steps, last = self.steps_taken, self.looks[-1]
        by_step = {n: self.seconds.get(n, 0.0) / steps[n] for n in arms if steps[n]}
        slowest = max(by_step.values())
        verdict = sum((last - steps[name]) * by_step.get(name, slowest) for name in arms)
        return verdict + (self.steps - last) * slowest * to_end

    def outcome(self, complete: int) -> Outcome:
        """What the first ``complete`` looks come to."""
        columns = {}
        for name in self.settings["rows"]:
            looks = [
                {arm: own[name] for arm, own in self.losses[str(step)].items()}
                for step in self.looks[:complete]
            ]
            columns[name] = Column(self.tokens.get(name, ()), looks, self.groups.get(name))
        return decide(
            columns["choosing"],
            columns.get("retention"),
            arms=[name for name in self.settings["arms"] if name != ALL],
            looks=len(self.looks),
            level=self.settings["level"],
            keep_retention=self.settings["keep_retention"],
        )


@dataclass(frozen=True)
class RaceResult:
    """The verdict of a race.

    Attributes:
        winner: name of the arm that goes on.
        outcome: differences by look, who left, who won.
        state: losses by row, steps, looks, seconds.
        trainer: of the winner, trained to the end; None after the looks alone.
    """

    winner: str
    outcome: Outcome
    state: RaceState
    trainer: Any = None


class _Looks(TrainerCallback):
    """Saves at each look, and stops at one of them, before which it has the arm measured.

    Before its first step the arm is measured as well.

    Attributes:
        stop: step of that look; None to go on to the end.
    """

    def __init__(self, looks: Sequence[int], measure: Callable[[int], None]) -> None:
        self._looks, self._measure = tuple(looks), measure
        self.stop: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Of the model as it is trained: on its device, in its arithmetic."""
        if state.global_step == 0:
            self._measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measured before the checkpoint is written: whoever finds that finds the losses too."""
        if state.global_step not in self._looks:
            return
        control.should_save = True
        if state.global_step == self.stop:
            self._measure(state.global_step)
            control.should_training_stop = True


def refused_races(args: Any) -> Iterator[ConfigError]:
    """Reasons for refusing a configuration whose run cannot be stopped at a look and go on.

    Args:
        args: configuration of the trainer.
    """
    reasons = {
        "load_best_model_at_end": "each stop would load the best checkpoint so far",
        "save_only_model": "no arm could go on from such a checkpoint",
        "auto_find_batch_size": "arms with other batches take other steps",
        "ignore_data_skip": "an arm would train on the same rows again after each look",
        "resume_from_checkpoint": "arms begin at the model, and a race goes on with --resume "
        "(resume=True)",
    }
    for name, why in reasons.items():
        if getattr(args, name, None):
            yield ConfigError(
                f"a race does not work with {name}",
                got=f"{name}={getattr(args, name)!r}",
                why=why,
                remedy="leave it out",
            )


def check_arms(
    args: Mapping[str, Any],
    datasets: Mapping[str, Any],
    set_aside: Callable[[int], int] | None = None,
) -> None:
    """Check that each arm has the rows that it values against, before any of them trains.

    Args:
        args: name of the arm -> configuration of its trainer.
        datasets: what all of their trainers are handed, by the argument's name.
        set_aside: trusted rows in all -> how many of them choose; None where these have a source of
            their own.

    Raises:
        ConfigError: rows that an arm lacks, too few of them, or retention rows or a Fisher that no
            arm reads.
    """
    names = ("validation", "retention", "fisher")
    read = {
        "fisher": any(own.reads_fisher for own in args.values()),
        "retention": any(own.reads_retention for own in args.values()),
    }
    unread = {k: v for k, v in datasets.items() if not read.get(k.partition("_")[0], True)}
    for own in args.values():
        # What none of them reads is refused with the first.
        handed = {**datasets_of(own, datasets), **unread}
        rows = {name: handed.get(f"{name}_dataset") for name in names}
        policy = chosen_policy(own, None, own.FAMILY)
        raise_first(refused_datasets(own, policy, rows, handed.get("fisher")))
    validation: Any = datasets.get("validation_dataset")
    if hasattr(validation, "__len__"):
        choosing: Any = datasets.get("choosing_dataset")
        choose = len(choosing) if hasattr(choosing, "__len__") else 0
        for name, own in args.items():
            _check_validation_rows(name, own, len(validation), choose, set_aside)


def datasets_of(args: Any, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """Data sets for the trainer of one arm: no Fisher or retention rows that only others read."""
    reads = {"fisher": args.reads_fisher, "retention": args.reads_retention}
    return {k: v for k, v in datasets.items() if reads.get(k.partition("_")[0], True)}


def _check_validation_rows(
    name: str, args: Any, rows: int, choosing: int, set_aside: Callable[[int], int] | None
) -> None:
    if not args.needs_values or args.objective == "stability":
        return
    try:
        pool_of(args, rows, args.world_size)
    except ConfigError as error:
        remedies = list(pool_remedies(args, rows, args.world_size))
        enough = in_all = enough_rows(args, rows, args.world_size)
        if set_aside is not None and enough is not None:
            trusted = rows + choosing
            if (fewer := min(choosing - 1, trusted - enough)) >= 2:
                remedies.append(f"choosing_rows={fewer} (--choosing_rows {fewer})")
            more = (n for n in range(trusted + 1, 20_000) if n - set_aside(n) >= enough)
            in_all = next(more, None)
        said = "" if in_all is None else f" ({in_all}{' in all' if set_aside else ''} are enough)"
        raise ConfigError(
            f"the arm '{name}' has too few validation rows",
            got=f"{choosing} rows that choose among the arms, and of the others {error.got}",
            why="rows that choose may not be valued against, and some are held out of every step",
            remedy=", or ".join([f"more validation rows{said}", *remedies]),
        ) from None


def reads_weights(args: Mapping[str, Any]) -> list[str]:
    """Names of the arms that train by the weights of rows; args as of :func:`check_arms`."""
    return [name for name, own in args.items() if own.row_weights != "refused"]


def options_in(folder: Path, args: Any) -> dict[str, Any]:
    """Options of an arm's run in a folder of its own; none in that of the whole run.

    Args:
        folder: of the arm.
        args: configuration of the run, whose caches all arms share.
    """
    if folder == Path(str(args.output_dir)):
        return {}
    caches = {
        name: str(cache_folder(getattr(args, name), args.output_dir, place))
        for name, place in CACHES.items()
    }
    return {"output_dir": str(folder), "push_to_hub": False, **caches}


def row_losses(trainer: Any, rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Loss of each row in nats a token, and its response tokens; of a pair its loss, and 1.

    In evaluation mode, one row a forward: no random number is drawn, and no row's loss depends on
    the others. The mode of the model and TRL's running metrics are afterwards as before.
    """
    adapter, losses, counts = find_adapter(trainer.model), [], []
    with evaluation_mode(trainer.model), torch.no_grad():
        trainer.prepare_pool(rows)
        for row in rows:
            total, count = objective_value(adapter, trainer.row_batch([row]), "choosing row")
            losses.append(total / count)
            counts.append(count)
    return losses, counts


class Race:
    """Arms, looks and state of one race.

    Args:
        make: makes the trainer of an arm, anew at each call, from the model as it is before
            training.
        config: options of the race.
        rows: "choosing", and "retention" if there are any: data sets in the form of the trainer's
            validation rows.
        folder: the run's ``output_dir``.
        say: prints a line for the user.
        shown: called with the result when a look is complete, on the first process.
    """

    def __init__(
        self,
        make: Make,
        config: RaceConfig,
        rows: Mapping[str, Any],
        folder: Path,
        *,
        say: Callable[[str], None] = print,
        shown: Callable[[RaceResult], None] | None = None,
    ) -> None:
        self._make, self._config, self._datasets, self.folder = make, config, dict(rows), folder
        self.arms = {arm.name: arm for arm in read_arms(config.arms)}
        if config.keep_retention and "retention" not in rows:
            raise ConfigError(
                "keep_retention needs retention rows",
                got="none",
                why="nothing would show what an arm forgets",
                remedy="retention_rows=..., --retention_file FILE; or leave keep_retention out",
            )
        self._print, self._shown = say, shown
        self._state: RaceState | None = None
        # Made to count the steps of the run, then the first arm's to train.
        self._first: tuple[Any, _Looks] | None = None
        self._agreed = False
        self._prepared: dict[str, list[dict[str, Any]]] | None = None
        self._first_process = is_first_process()

    @property
    def state(self) -> RaceState:
        """What is known so far."""
        assert self._state is not None
        return self._state

    def say(self, line: str) -> None:
        """Print a line in the first process."""
        if self._first_process:
            self._print(line)

    # --- the race ---------------------------------------------------------------------------------

    def run(self, *, resume: bool = False) -> RaceResult:
        """Train the arms to the last look, and decide.

        Args:
            resume: go on with the race of this folder, if there is one.

        Raises:
            ConfigError: a race is in the folder, and it is not to go on; or it is another race.
            UnsupportedError: weights are spread over processes. InputError: too few rows or steps.
        """
        self._begin(resume)
        complete, outcome = 0, self.state.outcome(0)
        while outcome.winner is None:
            running = [name for name in self.arms if name not in outcome.left_at]
            for name in running:
                if self._run_to(name, self.state.looks[complete]):
                    self._say_left(running)
            complete += 1
            outcome = self.state.outcome(complete)
            self._close_look(outcome)
        return RaceResult(outcome.winner, outcome, self.state)

    def winner(self, result: RaceResult) -> Any:
        """The trainer of the winner in the run's own folder; ``train("auto")`` goes on."""
        trainer, _ = self._trainer(self.arms[result.winner], self.folder)
        if self._first_process:
            self._move_up(result.winner)
        Ranks(trainer.accelerator).broadcast_object(None)  # none looks before they are there
        return trainer

    def _begin(self, resume: bool) -> None:
        """Read the state, or make it of a first trainer; say what will be done."""
        earlier = _read_state(self.folder / STATE)
        if earlier is not None and not resume:
            raise ConfigError(
                "there is a race in the folder",
                got=str(self.folder / STATE),
                why="two races would be mixed in it",
                remedy="--resume (resume=True) to go on with it, or another folder",
            )
        if earlier is not None:
            self._state = earlier
            refuse_other_run(self.state.settings, self.state.settings | self._settings())
            # An arm that has not begun has no checkpoint to be compared with.
            self._first = self._trainer(self.arms[ALL], self._arm_folder(ALL))
            self._say_plan()
        else:
            self._refuse_checkpoints()
            before = (self.folder / ARMS).exists()
            try:
                self._first = self._trainer(self.arms[ALL], self._arm_folder(ALL))
                self._say_plan()
                self._set_up()
                self._write()
            except AlphaTokenError:
                if not before:  # else a second try would be taken for another run's folder
                    shutil.rmtree(self.folder / ARMS, ignore_errors=True)
                raise

    def _say_plan(self) -> None:
        for line in self.plan():
            self.say(line)

    def _set_up(self) -> None:
        """Make a trainer of every other arm, so that none is refused after another has trained.

        A model that an estimator does not cover and weights of rows that are wrong are seen by a
        trainer alone. One model at a time is in memory.
        """
        for name in [name for name in self.arms if name != ALL]:
            self._first = None
            _free_memory()
            self._trainer(self.arms[name], self._arm_folder(name))
        _free_memory()

    def _refuse_checkpoints(self) -> None:
        if earlier := checkpoints(self.folder):
            raise ConfigError(
                "the folder holds checkpoints of another run",
                got=", ".join(path.name for _, path in earlier),
                why="those of the winner are moved there",
                remedy="another folder",
            )

    def plan(self) -> list[str]:
        """Sentences on what the race will do: arms, looks, rows, and what it costs in steps."""
        state = self.state
        steps, looks, extra = state.steps, state.looks, (len(self.arms) - 1) * state.looks[-1]
        rows = [counted_rows(name, one) for name, one in state.settings["rows"].items()]
        lines = [
            f"race of {len(self.arms)} arms ({', '.join(self.arms)}): looks at step"
            f"{'s' * (len(looks) > 1)} {', '.join(map(str, looks))} of {steps}, on "
            f"{' and '.join(rows)}; it takes at most {extra} steps more than one run "
            f"({extra / steps:.0%}), and what the values of its arms cost (of a walk its own steps "
            "once, then a forward beside each step)"
        ]
        if looks[0] < EARLIEST:
            lines.append(
                f"a look before step {EARLIEST} says little: whatever selects is ahead there, also "
                "where it loses later"
            )
        return lines

    def _settings(self) -> dict[str, Any]:
        """Settings that are known before a trainer is made."""
        looks = {} if self._config.looks is None else {"looks": list(self._config.looks)}
        return {
            "arms": {name: arm.as_dict() for name, arm in self.arms.items()},
            "level": self._config.level,
            "keep_retention": self._config.keep_retention,
            **looks,
        }

    def _close_look(self, outcome: Outcome) -> None:
        """Write what a look comes to, and remove the arms that have left."""
        if not self._first_process:
            return
        self._write(outcome)
        if self._shown is not None:
            self._shown(RaceResult(outcome.winner or "", outcome, self.state))
        for name in self.arms:
            lost = name in outcome.left_at or outcome.winner not in (None, name)
            if lost and not self._config.keep_arms:
                shutil.rmtree(self._arm_folder(name), ignore_errors=True)

    # --- one arm ----------------------------------------------------------------------------------

    def _arm_folder(self, name: str) -> Path:
        return self.folder / ARMS / self.arms[name].folder

    def _run_to(self, name: str, step: int) -> bool:
        """Train an arm to a look, unless it has been measured there; whether it was trained."""
        if name in self.state.losses.get(str(step), {}) or name in self.state.failures:
            return False
        self.say(f"{name}: to step {step} of {self.state.steps}")
        started = time.monotonic()
        first = self._first if name == ALL else None
        self._first = None
        trainer, looks = first or self._trainer(self.arms[name], self._arm_folder(name))
        looks.stop, state = step, self.state
        try:
            trainer.train(resume_from_checkpoint="auto")
        except NumericalError as problem:
            if name == ALL or trainer.args.world_size > 1:
                raise
            state.failures[name] = " ".join(str(problem).split())
            self.say(f"{name} leaves the race: {state.failures[name]}")
        state.seconds[name] = state.seconds.get(name, 0.0) + time.monotonic() - started
        if name not in state.losses.get(str(step), {}) and name not in state.failures:
            raise DataError(
                f"the arm '{name}' ended before the look",
                got=f"step {trainer.state.global_step}, the look is at step {step}",
                why="a callback stopped it, or its rows ran out",
                remedy="an earlier look, or no callback that ends a run",
            )
        del trainer, looks, first
        _free_memory()
        return True

    def _say_left(self, running: Sequence[str]) -> None:
        """Say how long the arms that run still take."""
        running = [name for name in running if name not in self.state.failures]
        left = self.state.seconds_left(running, to_end=not self._config.stop_after_looks)
        self.say(f"about {tqdm.format_interval(round(left))} left, by the pace of the arms so far")

    def _trainer(self, arm: Arm, folder: Path) -> tuple[Any, _Looks]:
        """A new trainer of an arm, with the steps of the whole run, and its looks."""
        trainer = self._make(arm, folder)
        kind = layout(trainer.accelerator)
        if kind not in ("single", "ddp"):
            raise UnsupportedError(
                "a race does not spread weights over processes",
                got=kind,
                why="each arm would need process groups of its own",
                remedy="torchrun without FSDP and DeepSpeed; or train the arms one by one",
            )
        rows = self._rows(trainer)
        facts = {name: _facts_of(own) for name, own in rows.items()}
        if self._state is None:
            self._state = self._new_state(trainer, facts)
        if not self._agreed:  # on what the first process has read, or made
            self._state = Ranks(trainer.accelerator).broadcast_object(self._state)
            self._agreed = True
        refuse_other_run({"rows": self.state.settings["rows"]}, {"rows": facts})
        if arm.name == ALL:  # first, since it names what differs
            self._require_same_run(trainer)
        self._require_same_start(trainer, arm)
        trainer.args.max_steps = self.state.steps
        looks = _Looks(self.state.looks, partial(self._look, trainer, arm, rows))
        trainer.add_callback(looks)
        return trainer, looks

    def _require_same_start(self, trainer: Any, arm: Arm) -> None:
        adapters = self.state.settings["run"].get("adapters"), adapter_settings(trainer.model)
        refuse_changes(
            changed_settings(*({"adapters": one or None} for one in adapters)),
            what=f"the arm '{arm.name}' has other adapters than the first one",
            why="their losses would differ by more than what they train on",
            remedy="the adapters that the race began with; of a function, one that makes the same "
            "ones at each call",
        )
        if _start(trainer) != self.state.settings["start"]:
            raise ConfigError(
                "the arms do not begin at the same weights",
                got=f"'{arm.name}' begins at others than the first arm did",
                why="their losses would differ by more than what they train on",
                remedy="the model that the race began with; of a function, one that makes the same "
                "model at each call",
            )

    def _require_same_run(self, trainer: Any) -> None:
        changes, _ = split_changes(self.state.settings["run"], trainer.run_facts())
        refuse_changes(
            changes,
            what="this is not the race to go on with",
            why="arms that trained by other options or on other rows would be compared",
            remedy="repeat the earlier arguments, and what is finished is kept; or another "
            "output_dir, and all of it is kept; or --overwrite_output, which removes the arms and "
            "begins anew",
        )

    def _rows(self, trainer: Any) -> dict[str, list[dict[str, Any]]]:
        """Tokenised choosing and retention rows, those of the first trainer for all of them."""
        if self._prepared is None:
            names = ("args", "processing_class", "model", "train_dataset")
            arguments = {name: getattr(trainer, name) for name in names}
            arguments["data_collator"] = trainer.own_collator
            self._prepared = {
                name: trainer.prepare_rows(trainer.read(own, name, arguments), name)
                for name, own in self._datasets.items()
            }
        # Copies, to which a trainer of pairs adds what its reference says.
        return {name: [dict(row) for row in own] for name, own in self._prepared.items()}

    def _new_state(self, trainer: Any, facts: dict[str, Any]) -> RaceState:
        """Of a trainer that has not begun: steps, looks and rows."""
        for name, own in facts.items():
            check_rows(own["prompts"], f"{name} rows")
        steps = whole_run(trainer)
        looks = list(looks_of(steps, self._config.looks, partial(_longer, trainer)))
        own = {"looks": looks, "rows": facts, "start": _start(trainer), "run": trainer.run_facts()}
        if trainer.args.FAMILY == "preference":
            own["unit"] = "nats a pair"
        return RaceState({"steps": steps, **self._settings(), **own})

    def _look(
        self, trainer: Any, arm: Arm, rows: Mapping[str, list[dict[str, Any]]], step: int
    ) -> None:
        """Measure an arm at a look; before the first step that which begins, once for all arms."""
        if step:
            self._measure(trainer, arm, rows, step)
        elif arm.name == ALL and not self.state.before:
            columns = {name: row_losses(trainer, own)[0] for name, own in rows.items()}
            self.state.before = Ranks(trainer.accelerator).broadcast_object(columns)
            self._write()

    def _measure(
        self, trainer: Any, arm: Arm, rows: Mapping[str, list[dict[str, Any]]], step: int
    ) -> None:
        """Measure an arm at a look, and write it down."""
        # Its values are written by the run that goes on from here.
        trainer.goes_on_later = True
        ranks, state = Ranks(trainer.accelerator), self.state
        columns = {name: row_losses(trainer, own) for name, own in rows.items()}
        # Those of the first process on all of them: none may decide by other bits.
        columns = ranks.broadcast_object(columns)
        state.tokens = {name: tokens for name, (_, tokens) in columns.items()}
        state.groups = {name: prompt_numbers(own) for name, own in rows.items()}
        losses = {name: own for name, (own, _) in columns.items()}
        state.losses.setdefault(str(step), {})[arm.name] = losses
        self._write()

    # --- files ------------------------------------------------------------------------------------

    def _write(self, outcome: Outcome | None = None) -> None:
        if self._first_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            follows = {} if outcome is None else {"outcome": asdict(outcome)}
            write_json(self.folder / STATE, asdict(self.state) | follows)

    def _move_up(self, name: str) -> None:
        """Move the winner's checkpoints into the run's own folder; what was moved stays there."""
        place = self._arm_folder(name)
        if not place.is_dir():
            return
        # The name of the run goes first, by which its checkpoints are recognised; the newest of
        # them next, so that a race that is killed here goes on from it.
        if (place / RUN).is_file():
            shutil.copy2(place / RUN, self.folder / RUN)
        for _, path in reversed(checkpoints(place)):
            if not (target := self.folder / path.name).exists():
                path.rename(target)
        flush(self.folder)
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # another arm is kept in it
            (self.folder / ARMS).rmdir()


def _read_state(path: Path) -> RaceState | None:
    """The state of a race that was begun; None where there is none.

    Raises:
        DataError: the file is no such state.
    """
    if not path.exists():
        return None
    content = read_json(path) or {}
    names = {one.name for one in fields(RaceState)}
    if not names <= content.keys():
        raise DataError(
            "the state of the race cannot be read",
            got=str(path),
            why="it was altered, or is of another program",
            remedy="--overwrite_output, or another folder",
        )
    return RaceState(**{name: content[name] for name in names})


def _facts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a race that goes on must find again of its choosing rows, or retention rows."""
    prompts = len({*prompt_numbers(rows)})
    return {"rows": len(rows), "prompts": prompts, "digest": dataset_digest(rows)}


def whole_run(trainer: Any) -> int:
    """Optimizer steps of a run that has not begun, as transformers counts them.

    Raises:
        ConfigError: a stream, of which only ``max_steps`` says it.
    """
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ConfigError(
            "a race needs to know the steps of the whole run",
            got="a stream of rows, max_steps not set",
            remedy="max_steps=N",
        )
    batches = len(trainer.get_train_dataloader())
    return steps_of(batches, args.gradient_accumulation_steps, args.num_train_epochs)


def _longer(trainer: Any, wanted: int) -> str:
    """Options with which the run of a trainer has so many steps, for a message."""
    world, rows = Ranks(trainer.accelerator).world, trainer.train_dataset
    # Of a stream max_steps says it, or it is no race.
    count = len(rows) if hasattr(rows, "__len__") else 0
    return Schedule.of(trainer.args, count, world).in_words(wanted)


def _start(trainer: Any) -> str | None:
    """Digest of the weights that a run begins at."""
    return weights_fingerprint(dict(trainer.model.named_parameters()))


def _free_memory() -> None:
    """Of a trainer that is out of use: its parts hold each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
