"""The paper's tables and figures by their labels: all named, planned offline, run in small."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alphatoken.errors import ConfigError
from alphatoken.support.storage import write_json
from alphatoken.train.trainer_loss import selecting
from alphatoken_lab.commands.paper import prepare_rows
from alphatoken_lab.measure.selection_cost import measured_selection
from alphatoken_lab.paper.exhibits import SCALES, Exhibit, every, find, printed_table, table_of
from alphatoken_lab.paper.figures import about_fisher, export_rows, words_of
from alphatoken_lab.paper.options import PaperOptions
from alphatoken_lab.paper.rows import OTHER, SIZES, write_rows
from alphatoken_lab.paper.work import Work
from alphatoken_lab.runner.records import with_costs
from alphatoken_lab.runner.tables import to_csv, to_html, to_markdown
from tests.both_programs import main
from tests.integration.library_decoder import make_tokenizer
from tests.lab.forked_cells import forked_cells
from tests.lab.test_tuning import cells_of
from tests.places import nightly

LABELS = {
    "tab:main_rq1_sft", "tab:main_rq1_dpo", "tab:ablation_rq3", "tab:app:fisher_structure",
    "tab:runtime_sft", "tab:runtime_po", "tab:metamathqa-gemma4b",
    "tab:magicoder_forgetting_gemma4b", "tab:app:pref_ablation_dpo", "tab:app:dpo_sensitivity",
    "tab:app_training_data", "tab:app_eval_benchmarks", "fig:framework", "fig:intervention_rq2",
    "fig:sensitivity", "fig:component_attribution", "fig:fisher_proxy_fidelity",
    "fig:app:vp_fidelity", "fig:app:token_tsne", "fig:app:representation_stability",
    "fig:app:sft_token_heatmaps",
}  # fmt: skip
"""Every label of a table or figure in the paper's text."""

RUN = [exhibit for exhibit in every() if exhibit.kind != "none"]
NAMES = [exhibit.label for exhibit in RUN]
SMALL = (
    "tab:main_rq1_dpo", "tab:main_rq1_sft", "tab:magicoder_forgetting_gemma4b", "tab:runtime_sft",
    "fig:app:representation_stability", "fig:app:vp_fidelity",
)  # fmt: skip
"""Every trainer, static pass, reference and merge; costs; a diagnosis of two cells, and one of what
a cell collects. The others' cells differ in options, which other tests here read."""
PLANNED = ("tab:main_rq1_dpo", "tab:main_rq1_sft")
"""Measured by answers, and by tasks of lm-eval."""


def cases(first: Sequence[str]) -> list[Any]:
    """Exhibits; those that are not among the first are of the nightly profile."""
    return [
        pytest.param(one, id=one.label, marks=() if one.label in first else nightly) for one in RUN
    ]


def work(exhibit: Exhibit, scale: str, folder: Path, *more: str, **options: Any) -> Work:
    return Work(exhibit, PaperOptions(scale=scale, output_dir=str(folder), **options), more)  # type: ignore[arg-type]


# --- what there is ------------------------------------------------------------------------------


def test_the_list_names_everything_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert {exhibit.label for exhibit in every()} == LABELS
    assert main(["paper", "--list"]) == 0
    text = capsys.readouterr().out
    for exhibit in every():
        part = text.split(f"\n{exhibit.label}  ")[1].split("\n\n")[0]
        assert exhibit.title in part
        if exhibit.kind != "none":
            assert re.search(r"\n  full +\d+ cells?\b.* of \S+/\S+, \S+/\S+", part), exhibit.label
            assert re.search(r"\n  laptop +\d+ cells?\b.* of SmolLM2", part), exhibit.label
        else:
            assert "Nothing is run for it" in part


@pytest.mark.parametrize("exhibit", RUN, ids=NAMES)
def test_an_exhibit_says_what_it_shows(exhibit: Exhibit, tmp_path: Path) -> None:
    """Each row a method of its grid, each printed row as long as the table, each label found."""
    assert find(exhibit.label) is exhibit
    assert find(exhibit.label.split(":")[-1]) is exhibit
    for scale in SCALES:
        planned = work(exhibit, scale, tmp_path)
        have = {(cell.task, cell.policy) for cell in planned.cells}
        for group in exhibit.groups_of(scale):
            assert {(group.task, line.policy) for line in group.rows} <= have
        assert exhibit.columns[scale] or exhibit.diagnosis
        # A table is of three seeds, a figure of a diagnosis of one.
        seeds = {cell.seed for cell in planned.cells if cell.measures is not None}
        assert seeds == ({0, 1, 2} if exhibit.groups else {0})
    counts = {len(line.printed) for group in exhibit.groups for line in group.rows}
    assert counts <= {0, len(exhibit.columns["full"])}
    assert exhibit.kind == "figure" or counts == {len(exhibit.columns["full"])}


SETTINGS = {
    "ρ": ("keep_ratio",), "λ": ("stability_weight",), "W": ("window",), "layers": ("layers",),
    "B_val": ("validation_rows", "validation_batch_size"), "β": ("beta",),
}  # fmt: skip
"""Last word of a group of settings -> the options that its rows set."""

CHANGES: dict[str, dict[str, Any]] = {
    "adaptation-only": {"objective": "adaptation"},
    "stability-only": {"objective": "stability"},
    "direct-only": {"part": "direct"},
    "causal-only": {"part": "causal"},
    "kronecker": {"retention": "kronecker"},
    "shared-threshold": {"shared_threshold": True},
    "masked-logit": {"masked_logit": True, "precompute_ref_log_probs": False},
    "random": {"policy": "random"},
    "bottom": {"policy": "bottom"},
}
"""How variants differ from AlphaToken, and in nothing else."""


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("label", ["fig:sensitivity", "tab:app:dpo_sensitivity"])
def test_a_row_of_a_setting_trains_with_the_number_that_it_names(
    label: str, scale: str, tmp_path: Path
) -> None:
    """And differs from AlphaToken's own cell in that option alone."""
    here = work(find(label), scale, tmp_path)
    cells = {(cell.task, cell.policy): cell.options for cell in here.cells if cell.seed == 0}
    for group in here.exhibit.groups:
        names = SETTINGS[group.title.split()[-1]]
        task = "laptop" if scale == "laptop" else group.task
        for line in group.rows:
            options, base = cells[task, line.policy], cells[task, "alphatoken"]
            differing = {k for k in {*options, *base} if options.get(k) != base.get(k)} - {"policy"}
            taken = {*names[-1:], *differing, *(names if scale == "full" else ())}
            assert differing <= set(names)
            assert bool(differing) == (line.policy != "alphatoken")
            for name in taken:
                default = {"beta": 0.1}.get(name)
                assert float(options.get(name, default)) == float(line.name), (line.policy, name)


@pytest.mark.parametrize("scale", SCALES)
def test_a_variant_differs_from_alphatoken_in_what_it_names(scale: str, tmp_path: Path) -> None:
    seen = set()
    for exhibit in RUN:
        here = work(exhibit, scale, tmp_path)
        cells = {(cell.task, cell.policy): cell.options for cell in here.cells if cell.seed == 0}
        for (task, method), options in cells.items():
            if method in CHANGES:
                base, change = cells[task, "alphatoken"], CHANGES[method]
                differing = {k: options.get(k) for k in {*options, *base}
                             if options.get(k) != base.get(k)}  # fmt: skip
                neutral = {"policy", "keep_scope", "kept_normalization"} - set(change)
                assert {k: v for k, v in differing.items() if k not in neutral} == change
                seen.add(method)
    assert seen == set(CHANGES)


def test_the_paper_s_means_are_means_of_what_it_prints() -> None:
    """That its numbers stand in the right columns: "Avg." is the mean of those before it."""
    for label in ("tab:main_rq1_sft", "tab:main_rq1_dpo", "tab:app:dpo_sensitivity"):
        exhibit = find(label)
        keys = [column.key for column in exhibit.columns["full"]]
        last = keys.index("retention")
        for group in exhibit.groups:
            for line in group.rows:
                numbers = [float(text.split(" ")[0]) for text in line.printed]
                assert statistics.fmean(numbers[:last]) == pytest.approx(numbers[last], abs=0.011)
                both = numbers[last], numbers[keys.index("target")]
                assert statistics.fmean(both) == pytest.approx(numbers[-1], abs=0.011)


def test_tables_share_their_cells(tmp_path: Path) -> None:
    """What the main table trained, the ablation finds: same folder, same specification."""
    main_table, ablation = (
        work(find(label), "full", tmp_path) for label in ("main_rq1_sft", "ablation_rq3")
    )
    assert main_table.folder.path == ablation.folder.path
    first = {cell.name: cell.spec() for cell in main_table.cells}
    shared = [cell for cell in ablation.cells if cell.name in first]
    assert [cell.policy for cell in shared] == ["alphatoken"] * 3
    assert all(cell.spec() == first[cell.name] for cell in shared)


def test_models_needed_first_are_cells(tmp_path: Path) -> None:
    """Warm starts, SePO's oracle and Token Cleaning's reference come before what needs them."""
    for label, scale, name, needs in (
        ("main_rq1_dpo", "full", "ultrafeedback-gemma/sepo-budget-seed0",
         {"references/ultrachat-gemma", "references/oracle-ultrafeedback-gemma"}),
        ("main_rq1_dpo", "full", "ultrafeedback-gemma/start-native-seed0",
         {"references/ultrachat-gemma"}),
        ("main_rq1_dpo", "laptop", "laptop/sepo-budget-seed0",
         {"references/warm", "references/oracle-laptop"}),
        ("main_rq1_sft", "full", "magicoder-qwen/token-cleaning-budget-seed2",
         {"references/curated-magicoder-qwen"}),
        ("main_rq1_sft", "laptop", "laptop/token-cleaning-budget-seed0",
         {"references/curated-laptop"}),
    ):  # fmt: skip
        found = work(find(label), scale, tmp_path).cells
        cells = [cell.name for cell in found]
        cell = found[cells.index(name)]
        assert set(cell.needs) == needs
        assert all(cells.index(one) < cells.index(name) for one in needs)


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exhibit", cases(PLANNED))
def test_a_dry_run_at_full_scale_works_offline(
    exhibit: Exhibit, no_network: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written."""
    words = ["paper", exhibit.label, "--output_dir", str(tmp_path), "--dry_run"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert re.search(r" x trained\n", text)
    assert "not here: model" in text
    assert not list(tmp_path.iterdir())


def test_the_full_scale_trains_with_the_papers_batches(tmp_path: Path) -> None:
    for label, rows in (("main_rq1_sft", 64), ("main_rq1_dpo", 64)):
        for cell in work(find(label), "full", tmp_path).cells:
            if cell.kind == "train":
                own = cell.options
                batch = own["per_device_train_batch_size"] * own["gradient_accumulation_steps"]
                warm = "ultrachat" in cell.name and "ultrafeedback" not in cell.name
                assert batch * 4 == (128 if warm else rows), cell.name
                assert own["accelerate_config"] in ("fsdp2", "zero2", "ddp")


def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    out = ["--output_dir", str(tmp_path / "out")]
    evaluation = ["--evaluation_dir", str(tmp_path / "none")]
    assert main(["paper", "main_rq1_dpo", *out, *evaluation]) == 2
    said = capsys.readouterr().err
    for name in ("model meta-llama/Llama-3.2-3B", "model google/gemma-3-4b-pt", "Qwen/Qwen3.5-9B",
                 "data set argilla/ultrafeedback-binarized-preferences",
                 "data set HuggingFaceH4/ultrachat_200k", "alpaca_eval.jsonl",
                 "arena_hard.jsonl"):  # fmt: skip
        assert name in said
    laptop = ["--scale", "laptop", "--model", str(tmp_path / "nowhere")]
    assert main(["paper", "metamathqa-gemma4b", *out, *laptop]) == 2
    said = capsys.readouterr().err
    assert "nowhere" in said
    assert "make models" in said
    assert not list(tmp_path.glob("out/*/*/laptop"))


# --- grids --------------------------------------------------------------------------------------


def grid(tmp_path: Path, text: str, name: str = "grid.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_grid_extends_another_and_takes_options_of_a_recipe(tmp_path: Path) -> None:
    base = grid(
        tmp_path,
        "seeds: [5]\nmodes: [budget]\npolicies: [standard, mine, yours]\n"
        "measures: {target_file: $UNSET_HERE/t.jsonl}\nkeep: [mine]\n"
        "methods: {mine: {policy: top, window: 8}, yours: {policy: top, policy_options: "
        "{oracle: '@of-{task}'}}}\n"
        "tasks: {a: {recipe: laptop-sft}}\nreferences: {of-b: {options: {max_steps: 3}}}\n",
        "base.yaml",
    )
    own = grid(
        tmp_path,
        f"extends: {base}\nmeasures: {{target_file: t.jsonl}}\n"
        "methods: {mine: {policy: top, window: 9}}\n"
        "tasks: {b: {recipe: laptop-sft, options: {model_name_or_path: m, max_steps: 7}}}\n"
        "model_name_or_path: m\n",
    )
    found = cells_of(own)
    assert list(found) == [
        "references/of-b", "b/standard-native-seed5", "b/mine-budget-seed5", "b/yours-budget-seed5",
    ]  # fmt: skip
    mine, yours = found["b/mine-budget-seed5"], found["b/yours-budget-seed5"]
    assert (mine.options["window"], mine.options["max_steps"]) == (9, 7)
    assert mine.options["validation_batch_size"] == 4  # of the recipe
    assert (mine.keep_model, yours.keep_model) == (True, False)
    assert yours.options["policy_options"] == {"oracle": "@of-b"}
    assert yours.needs == ("references/of-b",)
    with pytest.raises(ConfigError, match="UNSET_HERE"):  # where it is not replaced
        cells_of(base)


def test_grids_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="extends itself"):
        cells_of(grid(tmp_path, f"extends: {tmp_path / 'grid.yaml'}\n"))
    with pytest.raises(ConfigError, match="another command"):
        cells_of(grid(tmp_path, "measures: {target_file: t}\ntasks: {a: {recipe: laptop-dpo}}\n"))
    with pytest.raises(ConfigError, match="no such recipe"):
        cells_of(grid(tmp_path, "measures: {target_file: t}\ntasks: {a: {recipe: none}}\n"))


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SIZES)
def test_no_two_files_share_a_row(family: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", family)
    seen: dict[str, str] = {}
    ends: dict[str, str] = {}
    for path in sorted((tmp_path / "rows").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) >= 8
        for row in rows:
            key = row.get("prompt", row.get("text"))
            assert seen.setdefault(key, path.name) == path.name
            # A paragraph may be the text of one row and the end of another's response. Two
            # functions may end alike (ftplib's retrbinary and storbinary by 130 letters).
            body = row.get("text") or row.get("response") or row["chosen"]
            assert ends.setdefault(body[-200:], path.name) == path.name
    assert set(SIZES[family]) <= {path.stem for path in (tmp_path / "rows").glob("*.jsonl")}


def test_rows_are_drawn_from_the_whole_file_the_same_each_time(tmp_path: Path) -> None:
    """Not its first ones: a file may be sorted. Of a pair the longer response counts."""
    pairs = [
        {"prompt": f"q{i}", "chosen": f"yes {i}", "rejected": "no " * (200 if i % 2 else 1)}
        for i in range(800)
    ]
    mine = tmp_path / "pairs.jsonl"
    mine.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    prose = tmp_path / "prose.jsonl"
    prose.write_text("".join(json.dumps({"text": f"so {i}"}) + "\n" for i in range(300)))
    files = {"train": mine, "warm": prose, "retention": prose, "target": mine}
    for name in "ab":
        write_rows(tmp_path / name, "dpo", files)
    first, again = ((tmp_path / n / "train.jsonl").read_text() for n in "ab")
    assert first == again
    numbers = [int(json.loads(line)["prompt"][1:]) for line in first.splitlines()]
    assert len(numbers) == SIZES["dpo"]["train"]
    assert not any(i % 2 for i in numbers)
    assert max(numbers) > 400
    assert numbers != sorted(numbers)


def test_rows_of_other_files_are_not_taken_for_these(tmp_path: Path) -> None:
    """Nor those of a user's file for the standard library's; what is there can be laid out."""
    mine, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    rows = [{"prompt": f"What is {i}?", "response": f"{i}, no more."} for i in range(260)]
    for path in (mine, other):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {f"{name}_file": str(mine) for name in ("train", "target", "retention")}

    def prepared(**files: Any) -> None:
        prepare_rows(work(find("metamathqa-gemma4b"), "laptop", tmp_path / "out", **files))

    prepared(**given)
    prepared(**given)
    with pytest.raises(ConfigError, match="of other files"):
        prepared(**{**given, "train_file": str(other)})
    with pytest.raises(ConfigError, match="not the standard library"):
        prepared()
    prepared(only_report=True)
    mine.write_text(mine.read_text().replace("no more", "no less"))
    with pytest.raises(ConfigError, match="of other files"):  # it was changed since
        prepared(**given)


# --- what a figure's diagnostic is given --------------------------------------------------------


def test_rows_for_validation_are_no_training_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    here = work(find("fig:component_attribution"), "full", tmp_path)
    (task,) = here.grid.tasks
    names = [task.options[f"{kind}_column"] for kind in ("prompt", "response")]
    rows = [{name: f"{name} {i}" for name in names} for i in range(90)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    export_rows(task, tmp_path / "rows")
    train, held = (
        [json.loads(line) for line in (tmp_path / f"rows/{n}.jsonl").read_text().splitlines()]
        for n in ("train", "validation")
    )
    assert (len(train), len(held)) == (58, 32)
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held)
    assert {tuple(sorted(row)) for row in (*train, *held)} == {("prompt", "response")}


def test_the_fisher_of_a_trained_cell_is_handed_to_its_figure(tmp_path: Path) -> None:
    here = work(find("fig:fisher_proxy_fidelity"), "laptop", tmp_path, "--layers", "2")
    diagnosed, (task,) = here.exhibit.diagnosis, here.grid.tasks
    assert diagnosed is not None
    (cell,) = [one for one in here.cells if one.policy == diagnosed.model]
    file = here.folder.path / "fishers" / "abc.safetensors"
    for place in (here.folder.place(cell), file.parent):
        place.mkdir(parents=True)
    write_json(here.folder.place(cell) / "result.json", {"fisher": "abc"})
    file.touch()
    words = words_of(here, diagnosed, task, tmp_path / "out")
    assert words[words.index("--fisher_file") + 1] == str(file)
    assert words[words.index("--layers") + 1] == "2"
    text = about_fisher(here, cell)
    assert "the one that the model was trained with: 16 samples on prompts of fisher.jsonl" in text


# --- the layout ---------------------------------------------------------------------------------


def record(policy: str, seed: int, mode: str = "budget", **figures: Any) -> dict[str, Any]:
    own = {"task": "laptop", "policy": policy, "mode": mode, "seed": seed, "status": "done"}
    return {**own, "unit": "loss", **figures}


def test_a_table_holds_means_deviations_and_the_papers_numbers() -> None:
    found = [
        record("alphatoken", 0, target=1.0, retention=2.0, overall=1.5),
        record("alphatoken", 1, target=1.2, retention=2.0, overall=1.6),
        record("adaptation-only", 0, target=0.9, retention=2.5, overall=1.7),
        record("stability-only", 0, target=1.3, retention=1.9, overall=1.6),
        {**record("direct-only", 0), "status": "failed"},
    ]
    table = table_of(find("ablation_rq3"), "laptop", found)
    text = to_markdown(table)
    assert "over 1 to 2 seeds" in table.caption
    deviation = statistics.stdev([1.0, 1.2])
    assert f"<u>1.100 ± {deviation:.3f}</u>" in text
    assert "| Adaptation-only | 2.500 | **0.900** | 1.700 |" in text  # lower is better
    assert "| Direct-only (0 of 1 seeds) | – | – | – |" in text
    assert "| Causal-only | – | – | – |" in text
    assert "| Stability-only | 52.18 | 58.72 | 55.45 |" in printed_table(find("ablation_rq3"))
    assert "| **Objective** |" in text
    page = to_html(table)
    assert '<td class="best">0.900</td>' in page
    assert '<th colspan="3" class="over">Loss (nats)</th>' in page
    assert "Objective,Adaptation-only,adaptation-only" in to_csv(table)
    lines = [one for one in csv.DictReader(io.StringIO(to_csv(table))) if one["column"] and
             one["method"] == "alphatoken"]  # fmt: skip
    assert [float(one["deviation"]) for one in lines] == pytest.approx(
        [0.0, deviation, statistics.stdev([1.5, 1.6])]
    )


def test_hours_an_epoch_have_the_static_pass_of_the_seed_that_did_it() -> None:
    """step * steps of an epoch + the pass over the rows, which other seeds found in the cache."""
    found = with_costs(
        [
            record("stm", 0, time=20.0, steps=10, epoch_steps=90.0, static_time=180.0),
            record("stm", 1, time=40.0, steps=10, epoch_steps=90.0, static_time=0.0),
            record("alphatoken", 0, time=40.0, steps=10, epoch_steps=90.0,
                   selection_memory=3_500_000_000),
            record("start", 0),
        ]
    )  # fmt: skip
    hours = [one.get("hours_per_epoch") for one in found]
    assert hours[:3] == pytest.approx([0.1, 0.15, 0.1])
    assert hours[3] is None
    assert found[0]["relative_time"] == pytest.approx(0.5)
    assert "relative_time" not in found[1]  # AlphaToken has no such seed
    assert found[2]["selection_gb"] == pytest.approx(3.5)


# --- what choosing costs ------------------------------------------------------------------------


def test_the_selections_peak_is_told_apart_from_the_trainings() -> None:
    """Memory that is taken outside of sections counts for the whole alone."""
    mega = 2**20

    def take(size: int) -> None:
        torch.ones(size * mega // 4).sum()  # touched, then freed

    with measured_selection() as cost:
        base = cost.whole()
        assert cost.selection() is None
        take(600)
        with selecting():
            take(200)
            with selecting():
                take(10)
        small = cost.selection()
        assert base + 150 * mega < small < base + 450 * mega
        assert cost.whole() > base + 500 * mega
        cost.restart()
        assert cost.whole() < base + 450 * mega
        assert cost.selection() == small
        assert 0 < cost.seconds < 60
    with selecting():  # nobody measures
        take(1)
    assert cost.selection() == small


# --- runs in small ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all exhibits, so that each cell is trained once."""
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder that is as deep as the most layers that a table scores."""
    folder = tmp_path_factory.mktemp("eight") / "model"
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


OF_TRAINING = ("hours_per_epoch", "selection_gb", "relative_time")
"""Columns in which a model that is not trained has no number."""


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the cells ask for, short ones, and no more."""
    monkeypatch.setattr("alphatoken_lab.paper.rows.LETTERS", 300)
    small = {"train": 16, "validation": 64, "fisher": 16, "curated": 8, "target": 8, "oracle": 8}
    for sizes in (*SIZES.values(), OTHER):
        for name in sizes:
            size = small.get(name, 16)
            monkeypatch.setitem(sizes, name, min(sizes[name], size))  # type: ignore[arg-type]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("exhibit", cases(SMALL))
def test_every_exhibit_runs_in_small(
    exhibit: Exhibit, runs: Path, eight_layers: Path, few_rows: None
) -> None:
    """Two steps a cell on a tiny decoder; cells of earlier exhibits are found."""
    words = ["--model", str(eight_layers), "--seeds", "0", "--budget", "none", "--quiet"]
    more = ["--max_steps", "2", "--max_length", "320", "--bf16", "false", "--fisher_samples", "4",
            "--fisher_max_new_tokens", "4"]  # fmt: skip
    common = ["--scale", "laptop", "--output_dir", str(runs), *words, "--processes", "2", *more]
    with forked_cells():
        assert main(["paper", exhibit.label, *common]) == 0
    place = runs / "laptop"
    text = (place / f"{exhibit.name}.md").read_text()
    if exhibit.diagnosis is not None:
        pictures = re.findall(r"!\[.*\]\((\S+\.svg)\)", text)
        assert len(pictures) >= 1
        assert all((place / name).is_file() for name in pictures)
        of_fisher = exhibit.diagnosis.name == "fisher"
        assert of_fisher == ("is the one that the model was trained with" in text)
        return
    lines = [line for group in exhibit.groups_of("laptop") for line in group.rows]
    places = [(line.policy, column.key) for line in lines for column in exhibit.columns["laptop"]]
    printed = list(csv.DictReader((place / f"{exhibit.name}.csv").read_text().splitlines()))
    for (method, key), found in zip(places, printed, strict=True):
        assert found["method"] == method
        if not (method == "start" and key in OF_TRAINING):
            assert math.isfinite(float(found["mean"])), (method, key, found)


# --- the page -----------------------------------------------------------------------------------


def test_what_is_kept_belongs_to_the_cells_it_was_measured_on(tmp_path: Path) -> None:
    """Another option, another digest: a changed grid finds no number of the old one."""
    from benchmarks.paper.store import _digest, kept_records, work_of

    exhibit = find("tab:main_rq1_sft")
    here, there = (work_of(exhibit, tmp_path / name) for name in ("here", "there"))
    others = {cell.name: cell for cell in here.cells}
    digests = {name: _digest(here)(cell, others) for name, cell in others.items()}
    moved = {cell.name: cell for cell in there.cells}
    assert digests == {name: _digest(there)(cell, moved) for name, cell in moved.items()}
    assert len(set(digests.values())) == len(digests)
    changed = work(exhibit, "laptop", tmp_path / "here", "--learning_rate", "0.1")
    found = {one["policy"] for one in kept_records(changed) if one["status"] == "done"}
    assert found <= {"start"}  # which is trained at no rate
