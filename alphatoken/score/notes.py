"""Sentences that a reader of the values must know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alphatoken import FisherDrift
from alphatoken.data import EncodeReport, Survey
from alphatoken.data.encode import NO_RESPONSE
from alphatoken.score.job import Job
from alphatoken.score.rows import CorpusSurvey
from alphatoken.score.statistics import ValueSummary
from alphatoken.values import derivative_notes

__all__ = ["about_encoding", "about_pools", "write_notes"]

_APPROXIMATE = (
    "The estimator is the paper's: the direct part is exact, the causal part (Value-Propagation) "
    "is approximate. --estimator label gives the exact value that a loss mask acts on; --verify N "
    "compares the two on this model."
)


def write_notes(
    job: Job, survey: CorpusSurvey, summary: ValueSummary, warned: Sequence[str]
) -> list[str]:
    """Sentences for the report, the summary and the console; what is trivially so is left out."""
    estimator, queries = job.options.estimator, len(job.options.query)
    notes = [_APPROXIMATE] if estimator == "alphatoken" else []
    notes += derivative_notes(summary.derivatives)
    if estimator != "walk" and (job.fisher is not None or not queries):
        notes += _about_stability(job.fisher, summary)
    validation, counts = job.encoded, survey.counts
    if queries > 1:
        notes.append(
            f"Value and adaptation are against all {queries} queries together, each counted by its "
            "tokens."
        )
    elif validation.examples and not queries:
        notes.append(
            f"Adaptation is measured against {validation.response_tokens} response tokens of "
            f"{validation.examples} validation rows."
        )
    notes += about_pools(counts)
    if counts.get("bad_rows"):
        notes.append(f"{counts['bad_rows']} rows cannot be read; bad_rows.jsonl names them.")
    notes += about_encoding("train", survey.encoded) + about_encoding("validation", validation)
    return [*notes, *warned]


def _about_stability(fisher: FisherDrift | None, summary: ValueSummary) -> list[str]:
    if fisher is None:
        return ["No Fisher was given: stability is zero and the total is adaptation alone."]
    notes = []
    ranges = {one.key: (one.minimum, one.maximum) for one in summary.components}
    if ranges.get("stability") == (0.0, 0.0):
        notes.append(
            "The retention term is exactly zero: the model's weights are the Fisher's reference, "
            "as at the first step of training. Stability begins to count once they have moved."
        )
    if "row_keys" not in fisher.metadata:
        notes.append(
            "The Fisher does not say which prompts it was fitted on, so training rows could not be "
            "checked against them."
        )
    return notes


def about_pools(counts: Mapping[str, int], fisher_rows: str = "retention rows") -> list[str]:
    """Sentences about rows removed to keep pools apart; ``fisher_rows`` is the Fisher's pool."""
    removed = {
        "removed_same_as_validation": "training rows repeat a validation row or prompt",
        "removed_same_as_fisher": "training rows repeat a retention row or a prompt of the Fisher",
        "fisher_removed_same_as_validation": f"{fisher_rows} repeat a validation row or prompt",
    }
    shared = "; --leak_key conversation keeps those that share the prompt alone"
    return [
        f"{counts[key]} {what} and were removed{shared * (counts[key] > counts['train'])}."
        for key, what in removed.items()
        if counts.get(key)
    ]


def about_encoding(name: str, report: EncodeReport) -> list[str]:
    """Sentences about rows called ``name`` that were cut or left out."""
    rows = f"{'training' if name == 'train' else name} rows"
    notes, survey = [], Survey(rows)
    if report.truncated_rows:
        notes.append(
            f"{report.truncated_rows} {rows} are longer than allowed; {report.truncated_tokens} "
            "tokens were cut off their ends."
        )
    survey.leave_out(NO_RESPONSE, count=report.skipped_empty)
    survey.leave_out("they cannot be written as tokens", count=report.skipped_bad)
    return notes + [f"{sentence}." for sentence in survey.left_out(f"{rows} left out")]
