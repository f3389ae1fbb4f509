"""Options of a race: stated once, for ``race`` in Python and for ``alphatoken race``.

Nothing here imports torch: the command's help is made of the fields in a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.support.options import check_options, option, with_options_in_docstring


@with_options_in_docstring
@dataclass
class RaceConfig:
    """Arms, looks, and what becomes of the winner.

    Raises:
        ConfigError: an option out of its range, when the configuration is made.
    """

    arms: list[str] | dict[str, Any] | None = option(
        None,
        "Arms beside 'all': 'walk-80' (the 80 % of highest walk value, the default; likewise "
        "'exact-80', 'paper-80'), a policy by its name, NAME:OPTION=VALUE,... with options of the "
        "run under a name of your own, NAME:without_rows=4,13,15-18 (rows left out by number; in "
        "Python places from 0), or without:COLUMN=VALUE (those with this value).",
        within="see what it is",
    )
    looks: list[int] | None = option(
        None,
        "Steps at which arms are compared, ascending. Default: 2.5, 5 and 10 % of the run's steps, "
        "none before step 20.",
        within="steps of the run",
    )
    level: float = option(
        0.05,
        "Probability with which any interval of the race may miss, over all looks and arms.",
        above=0,
        below=1,
    )
    choosing_rows: int | None = option(
        None,
        "Validation rows to set aside as choosing rows, which no arm values against. Default: half "
        "of them, at least 8.",
        at_least=2,
    )
    keep_retention: bool = option(
        False,
        "An arm that is worse on the retention rows (its interval lies above 0 at the last look) "
        "cannot win.",
    )
    keep_arms: bool = option(
        False, "Keep the checkpoints of arms that have left or lost, in output_dir/arms."
    )
    stop_after_looks: bool = option(
        False, "End with the verdict; the same command with --resume and without this goes on."
    )

    def __post_init__(self) -> None:
        """Check each option."""
        check_options(self, RaceConfig)
        looks = self.looks
        if looks is None:
            return
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in looks)
        if not whole or not looks or looks[0] < 1 or sorted({*looks}) != list(looks):
            raise ConfigError(
                "looks must be ascending steps, at least one",
                got=repr(looks),
                remedy="such as looks=[20, 40, 80]; --looks 20 40 80",
            )
