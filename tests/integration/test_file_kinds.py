"""Kinds of files that people hand over: the rows, or what the file is and a remedy that works."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphatoken.data import Fields, read_records, read_rows
from alphatoken.data.source import find_source
from alphatoken.errors import DataError

ROWS = [
    {"prompt": f"Wie viel ist {n} + {n}?", "response": f'„{n + n}“,\nsaid "she" \u2028{n}'}
    for n in range(600)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def table(separator: str) -> bytes:
    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    rows = [["prompt", "response"], *([cell(t) for t in row.values()] for row in ROWS)]
    return "".join(separator.join(row) + "\r\n" for row in rows).encode()


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def texts(name: str) -> list[str]:
    return [row[name] for row in ROWS]


def zstd(data: bytes) -> bytes:
    packed = pa.compress(data, codec="zstd", asbytes=True)
    assert isinstance(packed, bytes)
    return packed


PLAIN: dict[str, tuple[str, Callable[[], bytes]]] = {
    "gzip": ("rows.jsonl.gz", lambda: gzip.compress(LINES)),
    "bzip2": ("rows.JSONL.BZ2", lambda: bz2.compress(LINES)),
    "xz": ("rows.ndjson.xz", lambda: lzma.compress(LINES)),
    "zstd": ("rows.jsonl.ZST", lambda: zstd(LINES)),
    "gzip by another name": ("rows.jsonl", lambda: gzip.compress(LINES)),
    "CSV": ("rows.csv", lambda: table(",")),
    "CSV with a mark": ("rows.csv.gz", lambda: gzip.compress(b"\xef\xbb\xbf" + table(","))),
    "CSV of a German spreadsheet": ("rows.CSV", lambda: table(";")),
    "TSV": ("rows.tsv", lambda: table("\t")),
    "a compressed list": ("rows.json.gz", lambda: gzip.compress(json.dumps(ROWS).encode())),
    "objects with indentation": (
        "rows.json", lambda: "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()
    ),
    "objects with indentation and commas": (
        "rows.json", lambda: ",\n".join(json.dumps(row, indent=1) for row in ROWS).encode()
    ),
    "lines of an old Mac": (
        "rows.jsonl", lambda: "\r".join(map(json.dumps, ROWS)).encode()
    ),
    "a list without its brackets": (
        "rows.jsonl", lambda: ",\n".join(map(json.dumps, ROWS)).encode()
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_rows_are_read_whatever_the_file_is(kind: str, tmp_path: Path) -> None:
    name, made = PLAIN[kind]
    (tmp_path / name).write_bytes(made())
    source = find_source(tmp_path / name)
    assert source.rows == len(ROWS)
    for start, stop in ((0, 600), (0, 1), (255, 258), (511, 513), (599, 600)):
        assert [one.record for one in source.read(start, stop)] == ROWS[start:stop]
    assert [row.response for row in read_rows(tmp_path / name)] == texts("response")


def test_parquet_is_read_with_bytes_for_texts_and_maps_for_messages(tmp_path: Path) -> None:
    as_bytes = {name: pa.array(texts(name)).cast(pa.binary()) for name in ("prompt", "response")}
    path = parquet(tmp_path / "bytes.parquet", {**as_bytes, "digest": [b"\xff\xd8"] * 600})
    assert [row.response for row in read_rows(path)] == texts("response")
    assert next(read_records(path))[1]["digest"] == b"\xff\xd8", "no text, so it stays"
    chat = [[("role", "user"), ("content", "Hi")], [("role", "assistant"), ("content", "Ho")]]
    messages = pa.array([chat], pa.list_(pa.map_(pa.string(), pa.string())))
    (row,) = read_rows(parquet(tmp_path / "maps.parquet", {"messages": messages}))
    assert (row.prompt, row.response) == ("Hi", "Ho")
    # Parquet under another name is Parquet.
    (tmp_path / "rows.jsonl").write_bytes(path.read_bytes())
    assert find_source(tmp_path / "rows.jsonl").rows == 600


@pytest.mark.parametrize(("suffix", "mark"), [(".tsv", "\t"), (".csv", "\t"), (".csv", ",")])
def test_a_row_over_several_lines_is_named_by_its_first(
    suffix: str, mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a table by tabs it is said, too: there the quote may be a plain character."""
    lines = [
        "prompt,response",
        '"I said,hello there.',
        'Goodbye",see you.',
        "",
        "Who?,Me.",
        "a,b,c",
    ]
    path = tmp_path / f"rows{suffix}"
    path.write_text("\n".join(lines).replace(",", mark))
    rows = read_rows(path, on_bad_rows="skip")
    assert [row.place.split(", ")[1] for row in rows] == ["line 2", "line 5"]
    assert rows[0].prompt == f"I said{mark}hello there.\nGoodbye"
    said = "in 1 of 2 rows a quoted text runs over several lines of the table"
    assert (said in caplog.text) == (mark == "\t")
    assert "(rows" + suffix + ", line 6)" in caplog.text
    path.write_text("\n".join([*lines[:-1], '"Who?,Me', "You?,I."]).replace(",", mark))
    with pytest.raises(DataError, match=r"from line 6 on: unexpected end.*close each quote"):
        read_rows(path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "a pointer of Git LFS": ("rows.jsonl", LFS, "is a pointer of Git LFS.*git lfs pull"),
    "such a pointer, by name Parquet": ("rows.parquet", LFS, "is a pointer of Git LFS"),
    "a web page": ("rows.jsonl", b"\n<!DOCTYPE html>\n<html>", "is a web page.*resolve/main"),
    "a zip archive": ("rows.zip", b"PK\x03\x04....", "is a zip archive.*unpack it"),
    "UTF-16": ("rows.jsonl", LINES.decode().encode("utf-16"), "is UTF-16, and not UTF-8.*iconv"),
    "UTF-16 without a mark": ("rows.csv", '{"a": 1}'.encode("utf-16-be"), "is UTF-16"),
    "Latin-1": ("rows.jsonl", '{"prompt": "Größe"}'.encode("latin-1"), "not UTF-8.*iconv"),
    "a table in Latin-1": ("rows.csv", "prompt\nGröße\n".encode("latin-1"), "not UTF-8.*iconv"),
    "a cut archive": ("rows.jsonl.gz", gzip.compress(LINES)[:-99], "cannot be unpacked.*cut short"),
    "a cut zstd": ("rows.jsonl.zst", zstd(LINES)[:-99], "cannot be unpacked.*cut short"),
    "an empty zstd": ("rows.jsonl.zst", b"\x28\xb5\x2f\xfd", "cannot be unpacked.*cut short"),
    "compressed Parquet": ("rows.parquet.gz", gzip.compress(b"PAR1"), "compressed Parquet.*unpack"),
    "a text": ("rows.txt", b"One line.\n", "unknown kind of data file.*on each line"),
    "a description": ("dataset_infos.json", b'{"default": {}}', "describes a data set"),
    "a row with a cell too much": ("rows.csv", b"prompt,response\na,b,c\n", "line 2: 3 cells, 2 c"),
    "two columns of one name": ("rows.csv", b"a,to,to\n1,2,3\n", "have one name.*'to'"),
    "UTF-16, compressed": (
        "rows.jsonl.gz", gzip.compress(LINES.decode().encode("utf-16")),
        r"unpack it as \S*rows\.jsonl; then iconv -f UTF-16 -t UTF-8 \S*rows\.jsonl > utf8\.jsonl",
    ),
    "a quote that stays open": ("rows.csv", b'prompt,response\na,"b\nc,d\n', "close each quote"),
    "a table as JSON": ("rows.jsonl", b"prompt,response\na,b\n", "like a table.*to rows.csv"),
    "a table by tabs": ("a.json.gz", gzip.compress(b'a\t"b"\n1\t2\n'), "table.*to a.tsv.gz"),
    "gzip in gzip": ("rows.jsonl.gz", gzip.compress(gzip.compress(LINES)), "is compressed twice"),
    "a broken object with indentation": ("rows.json", b'{\n "prompt": "a",\n "resp', "broken JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_holds_no_rows_is_refused_by_what_it_is(kind: str, tmp_path: Path) -> None:
    name, content, message = REFUSED[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_rows(tmp_path / name)
    assert name in str(error.value)
    assert error.value.remedy


AROUND: dict[str, tuple[Any, str]] = {
    "one list": ({"version": 1, "data": ROWS[:3]}, "'data' holds 3 rows"),
    "splits": ({"train": ROWS[:3], "test": ROWS[:1]}, "'train' holds 3 rows, 'test' holds 1"),
    "columns of pandas": (
        {name: {str(n): row[name] for n, row in enumerate(ROWS[:3])} for name in ROWS[0]},
        "a table written by columns",
    ),
    "columns of datasets": ({n: texts(n)[:3] for n in ROWS[0]}, "a table written by columns"),
    "orient split": (
        {"columns": [*ROWS[0]], "index": [0, 1, 2], "data": [[*r.values()] for r in ROWS[:3]]},
        "a table written by columns",
    ),
}


@pytest.mark.parametrize(("indent", "packed"), [(None, True), (2, False)])
@pytest.mark.parametrize("kind", AROUND)
def test_an_object_around_the_rows_is_refused_and_the_remedy_writes_them(
    kind: str, indent: int | None, packed: bool, tmp_path: Path
) -> None:
    document, message = AROUND[kind]
    written = json.dumps(document, indent=indent).encode("utf-8-sig")
    name = "all.json.gz" if packed else "all.json"
    (tmp_path / name).write_bytes(gzip.compress(written) if packed else written)
    with pytest.raises(DataError, match=message) as error:
        read_rows(tmp_path / name)
    assert error.value.remedy.startswith("unpack it as") == packed
    (tmp_path / name).unlink()
    (tmp_path / "all.json").write_bytes(written)
    program = re.search('python -c "(.*)"', error.value.remedy)
    assert program is not None
    exec(program.group(1), {})
    (made,) = (path for path in tmp_path.iterdir() if path.name != "all.json")
    assert f"move {name} out of the folder" in error.value.remedy
    assert [record for _, record in read_records(made)] == ROWS[:3]


def test_a_chat_alone_is_a_row_whatever_its_column_is_called(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "one.json").write_text(json.dumps({"dialogue": chat}, indent=1))
    with pytest.raises(
        DataError, match="name the chat: --messages_column dialogue.*or mend the row"
    ):
        read_rows(tmp_path / "one.json")
    (row,) = read_rows(tmp_path / "one.json", fields=Fields(messages="dialogue"))
    assert row.response == "Ho"


@pytest.mark.parametrize(
    ("train", "held"),
    [("train.jsonl", "test.jsonl"), ("train-0-of-1.jsonl", "validation-0-of-1.jsonl"),
     ("sums_train.jsonl", "sums_dev.jsonl")],
)  # fmt: skip
def test_splits_beside_each_other_are_refused(train: str, held: str, tmp_path: Path) -> None:
    for name in (train, held):
        (tmp_path / name).write_bytes(LINES)
    with pytest.raises(DataError, match=f"several splits.*{held} beside {train}") as error:
        read_rows(tmp_path)
    assert f"name the file: {tmp_path / train};" in error.value.remedy
    (tmp_path / "inner").mkdir()
    (tmp_path / held).rename(tmp_path / "inner" / held)
    (tmp_path / "latest-trained.jsonl").write_bytes(LINES)  # words, and no parts of words
    assert len(read_rows(tmp_path)) == 2 * len(ROWS)


def test_of_a_folder_every_file_is_read_or_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(first: int, last: int) -> bytes:
        return "".join(json.dumps(row) + "\n" for row in ROWS[first:last]).encode()

    folder = tmp_path / "rows"
    (folder / "deeper" / "data").mkdir(parents=True)
    (folder / "part-0.jsonl").write_bytes(lines(0, 3))
    (folder / "part-1.jsonl.gz").write_bytes(gzip.compress(lines(3, 9)))
    (folder / "part-2.CSV").write_bytes(table(",").replace(b"\r\n", b"\n"))
    (folder / "part-3.JSONL.zst").write_bytes(zstd(lines(9, 12)))
    (folder / "part-4.jsonl").write_text("\n")
    (folder / "deeper" / "data" / "test.parquet").write_bytes(b"PAR1")
    for name in ("README.md", "dataset_infos.json", "sheet.xlsx", ".gitattributes"):
        (folder / name).write_text("{}")
    with caplog.at_level(logging.INFO, "alphatoken.data"):
        rows = read_rows(folder)
    assert [row.response for row in rows] == [
        *texts("response")[:9], *texts("response"), *texts("response")[9:12]
    ]  # fmt: skip
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert said.getMessage() == (
        "rows: prompt = prompt, response = response; "
        "files read: part-0.jsonl, part-1.jsonl.gz, part-2.CSV, part-3.JSONL.zst; "
        "files not read, another kind of file: README.md, sheet.xlsx; "
        "files not read, it describes a data set: dataset_infos.json; "
        "files not read, in a folder inside: deeper/data/test.parquet; "
        "files not read, no rows in it: part-4.jsonl"
    )
    caplog.clear()
    assert len(list(read_records(folder))) == 612
    assert "files not read, another kind of file: README.md" in caplog.text
    for path in folder.glob("part-*"):
        path.unlink()
    with pytest.raises(DataError, match=r"no data files.*name the folder.*deeper/data\."):
        read_rows(folder)
