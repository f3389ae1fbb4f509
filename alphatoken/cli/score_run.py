"""The work of ``alphatoken score``: its options as a job of ``alphatoken.corpus``."""

from __future__ import annotations

from alphatoken.cli.reading import job_spec
from alphatoken.cli.score import ScoreOptions
from alphatoken.corpus.run import score_corpus
from alphatoken.corpus.spec import EngineSpec, ResultSpec

__all__ = ["run"]


def run(options: ScoreOptions) -> None:
    """Value ``options.train_file`` and write everything to ``options.output_dir``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    spec = job_spec(
        options,
        output_dir=options.output_dir,
        ratio=options.ratio,
        scope=options.scope,
        format=options.format,
        shard_size=options.shard_size,
        components=options.components,
        parameters=options.parameters,
        offload="stream" if options.offload else "none",
    )
    wanted = ResultSpec(
        report=options.report,
        report_rows=options.report_rows,
        dataset=options.write_dataset,
        verify=options.verify,
    )
    engine = EngineSpec(
        name=options.engine,
        workers=options.workers,
        gpus=options.gpus_per_worker,
        cpus=options.cpus_per_worker,
    )
    score_corpus(spec, wanted, engine, resume=options.resume, overwrite=options.overwrite_output)
