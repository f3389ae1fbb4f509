"""Files are written whole or not at all, and refused when they are not what was written."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from alphatoken.errors import DataError, FisherError
from alphatoken.support.storage import (
    open_line,
    read_tensors,
    replacing,
    replacing_folder,
    write_tensors,
)

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool,
)  # fmt: skip


def random_tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...], strided: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, 2, generator=generator, dtype=torch.float64) * 100
    values = values.to(dtype)
    return values[..., 0] if strided else values[..., 0].contiguous()


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True))
    tensors = {
        name: random_tensor(
            draw(st.integers(0, 2**32)),
            draw(st.sampled_from(DTYPES)),
            tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
            draw(st.booleans()),
        )
        for name in names
        if name != "__metadata__"
    }
    if tensors and draw(st.booleans()):
        tensors["shares memory"] = next(iter(tensors.values())).flatten()
    return tensors


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    raw = bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())
    return tensor.dtype, tuple(tensor.shape), raw


@given(tensors=tensor_dicts(), text=st.text(max_size=20))
def test_what_is_read_is_what_was_written_bit_for_bit(
    tensors: dict[str, Tensor], text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    tensors["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    write_tensors(path, tensors, {"text": text})
    found, metadata = read_tensors(path)
    assert metadata == {"text": text}
    assert {k: bits(v) for k, v in found.items()} == {k: bits(v) for k, v in tensors.items()}


def small_file(folder: Path) -> tuple[Path, bytes]:
    path = folder / "small.safetensors"
    if not path.exists():
        write_tensors(path, {"a": torch.arange(5.0), "b": torch.ones(2, 2)}, {"kind": "test"})
    return path, path.read_bytes()


@given(data=st.data())
def test_a_file_cut_at_any_byte_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, content = small_file(tmp_path_factory.getbasetemp())
    cut = path.with_name("cut.safetensors")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError, match=cut.name):
        read_tensors(cut)


def test_a_file_with_other_metadata_or_types_is_refused(tmp_path: Path) -> None:
    """Its numbers are those that it was written with, byte by byte."""
    path, _ = small_file(tmp_path)
    with safe_open(str(path), framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in ("a", "b")}
        metadata = dict(file.metadata())
    other = tmp_path / "other.safetensors"
    save_file(kept, other, metadata=metadata)
    assert read_tensors(other)[1] == {"kind": "test"}
    as_integers = {name: tensor.view(torch.int32) for name, tensor in kept.items()}
    flat = {**kept, "b": kept["b"].flatten()}
    for tensors, more in (
        (kept, {"kind": "another"}), (kept, {"more": "1"}), (as_integers, {}), (flat, {}),
    ):  # fmt: skip
        save_file(tensors, other, metadata=metadata | more)
        with pytest.raises(DataError, match="does not match the sha256"):
            read_tensors(other)


@given(data=st.data())
def test_a_file_with_any_byte_changed_is_refused_or_says_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same it says only with another white space around its header."""
    path, content = small_file(tmp_path_factory.getbasetemp())
    changed = bytearray(content)
    place = data.draw(st.integers(0, len(content) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    other = path.with_name("changed.safetensors")
    other.write_bytes(changed)
    if {content[place], changed[place]} <= set(b" \t\r\n"):
        before, after = read_tensors(path), read_tensors(other)
        assert after[1] == before[1]
        assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
        return
    with pytest.raises(DataError, match=other.name):
        read_tensors(other)


@pytest.mark.parametrize(
    "content", [None, "a folder", b"", b"{}", b"\xff" * 64, bytes(8) + b"hello", b"PK\x03\x04"]
)
def test_other_files_are_refused(content: bytes | str | None, tmp_path: Path) -> None:
    """And where there is none."""
    path = tmp_path / "other"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(FisherError, match="other.*cannot be read"):
        read_tensors(path, error=FisherError)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes fail with an OSError, as on a full disk; for any user."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 100, 8192, 65536])
def test_a_write_that_fails_leaves_the_old_file(limit: int, tmp_path: Path) -> None:
    path, content = small_file(tmp_path)
    with file_size_limit(limit), pytest.raises(FisherError, match="could not be written"):
        write_tensors(path, {"a": torch.zeros(50_000)}, {}, error=FisherError)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt, MemoryError])
def test_an_exception_leaves_the_old_file(problem: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert temporary.parent == tmp_path  # os.replace is atomic within a file system only
            raise problem

    with pytest.raises(problem):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "of" / "rows"
    with replacing_folder(folder) as first:
        (first / "a").write_text("1")

    def interrupted() -> None:
        with replacing_folder(folder) as second:
            (second / "b").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in folder.iterdir()] == ["a"]
    with replacing_folder(folder) as third:
        assert not list(third.iterdir())
        (third / "c").write_text("3")
    assert [path.name for path in folder.iterdir()] == ["c"]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_in_the_way_and_a_missing_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "taken", tmp_path / "missing" / "file"):
        with pytest.raises(DataError, match="could not be written"):
            write_tensors(path, {"a": torch.zeros(1)}, {})
    assert os.listdir(tmp_path) == ["taken"]


def test_links_are_followed_and_permissions_are_the_usual_ones(tmp_path: Path) -> None:
    target, link, plain = tmp_path / "target", tmp_path / "link", tmp_path / "plain"
    plain.touch()
    link.symlink_to(target)
    write_tensors(link, {"a": torch.zeros(1)}, {})
    assert link.is_symlink()
    assert target.stat().st_mode == plain.stat().st_mode


def test_a_page_is_opened_by_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "a page.html"
    for programs, command in (
        (("xdg-open", "open"), ["xdg-open", str(page)]),
        (("open",), ["open", str(page)]),
        ((), [sys.executable, "-m", "webbrowser", f"{tmp_path.as_uri()}/a%20page.html"]),
    ):
        monkeypatch.setattr(shutil, "which", lambda name, there=programs: name in there)
        assert shlex.split(open_line(page).removeprefix("open: ")) == command
