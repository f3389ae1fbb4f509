"""Errors in how models are compared."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.lab import properties_length as length
from tests.property.mutation import Claim, Edit, Mutant, claim

MAXIMUM = claim(length.check_against_bisection, length.comparisons())
PLAIN = claim(
    length.check_without_covariance_it_is_plain,
    length.lengths,
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3),
)
EVEN = claim(length.check_length_alone_is_even, length.lengths, st.floats(-1.5, 1.5))
EXCHANGE = claim(length.check_exchange_of_models, length.comparisons())


def _length(name: str, sentence: str, edit: tuple[str, str, str], *claims: Claim) -> Mutant:
    target, old, new = edit
    place = f"compare.length_control.{target}"
    return Mutant(name, sentence, (Edit(place, old, new),), claims, listed=False)


MUTANTS = (
    _length(
        "lengths-centred",
        "0 is the mean difference in length, not equal length",
        ("length_controlled_rate", "np.tanh(d / spread)", "np.tanh((d - d.mean()) / spread)"),
        MAXIMUM, EVEN,
    ),
    _length(
        "length-not-bounded",
        "the difference in length enters without tanh",
        ("length_controlled_rate", "np.tanh(d / spread)", "d / spread"),
        MAXIMUM,
    ),
    _length(
        "rate-at-the-observed-lengths",
        "the rate is predicted where the answers are as long as they are",
        (
            "length_controlled_rate",
            "expit(_fitted(y, np.tanh(d / spread))[0])",
            "expit(_fitted(y, np.tanh(d / spread)) @ [1.0, np.tanh(d / spread).mean()])",
        ),
        EVEN, MAXIMUM,
    ),
    _length(
        "length-never-fitted",
        "the rate stays the plain one whatever length explains",
        ("_fitted", "np.stack([np.ones_like(t), t], axis=1)",
         "np.stack([np.ones_like(t), 0 * t], axis=1)"),
        EVEN, MAXIMUM,
    ),
    _length(
        "ridge-on-the-ability",
        "the model's own term is drawn to an even rate as well",
        ("_fitted", "np.diag([0.0, RIDGE])", "np.diag([RIDGE, RIDGE])"),
        PLAIN, MAXIMUM,
    ),
    _length(
        "own-length-alone",
        "only the length of our own answer counts",
        ("length_controlled_rate", "len(one) - len(other) for", "2 * len(one) for"),
        EXCHANGE, MAXIMUM,
    ),
)  # fmt: skip
