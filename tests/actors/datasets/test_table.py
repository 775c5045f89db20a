"""Data sets in files: every format gives the rows of the same JSON Lines file, by number."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.datasets import Dataset, make_dataset
from actors.datasets.identity import data_changes, identities
from actors.datasets.prepared import Prepared
from actors.datasets.readers import GROUP_BYTES
from actors.datasets.table import Preview, Source
from schemas.config.data import DatasetConfig, JsonlConfig, Split
from schemas.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"question": f"{n}+1=\n„{n}“", "solution": str(n + 1), "level": f"{n % 3}"} for n in range(57)
]
CHATS: list[dict[str, Any]] = [
    {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n}+1"}], "solution": n + 1}
    for n in range(5)
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    """JSON Lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zst(data: bytes) -> bytes:
    """Data compressed by Zstandard."""
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    """CSV with a quoted line break in each row."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: list[dict[str, Any]], row_group_size: int) -> Callable[[Path], None]:
    """A function that writes the rows as parquet."""
    return lambda path: pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)


def arrow(rows: list[dict[str, Any]], new: Callable[..., Any]) -> Callable[[Path], None]:
    """A function that writes the rows as Arrow, in batches of 10."""

    def write(path: Path) -> None:
        table = pa.Table.from_pylist(rows)
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=10)

    return write


def text(data: bytes) -> Callable[[Path], None]:
    """A function that writes bytes."""
    return lambda path: path.write_bytes(data) and None


FORMATS: dict[str, Callable[[list[dict[str, Any]]], Callable[[Path], None]]] = {
    "rows.jsonl": lambda rows: text(b"\n" + lines(rows).replace(b"\n", b"\r\n  \n", 1)),
    "rows.ndjson": lambda rows: text(lines(rows)[:-1]),
    "rows.jsonl.gz": lambda rows: text(gzip.compress(lines(rows))),
    "rows.jsonl.bz2": lambda rows: text(bz2.compress(lines(rows))),
    "rows.jsonl.xz": lambda rows: text(lzma.compress(lines(rows))),
    "rows.jsonl.zst": lambda rows: text(zst(lines(rows))),
    "rows.json": lambda rows: text(json.dumps(rows, indent=2).encode()),
    "rows.json.gz": lambda rows: text(gzip.compress(json.dumps(rows).encode())),
    "lines.json": lambda rows: text(lines(rows)),
    "rows.parquet": lambda rows: parquet(rows, 10),
    "rows.arrow": lambda rows: arrow(rows, pa.ipc.new_stream),
    "file.arrow": lambda rows: arrow(rows, pa.ipc.new_file),
}


def table(path: Path, purpose: Split = "train", folder: Path | None = None, **keys: Any) -> Dataset:
    """The data set of a path, prepared next to it."""
    prepared = Prepared(folder or (path if path.is_dir() else path.parent) / ".prepared")
    return make_dataset(DatasetConfig(path=str(path), **keys), purpose, 0, prepared=prepared)


def examples(dataset: Dataset) -> list[Any]:
    """All examples, read in an order that jumps."""
    order = sorted(range(dataset.num_examples or 0), key=lambda index: (index * 31) % 57)
    found = {index: dataset.example(index) for index in order}
    return [found[index] for index in sorted(found)]


def rows_of(dataset: Dataset) -> list[Any]:
    """The solutions of all examples."""
    return [one.columns["solution"] for one in examples(dataset)]


def error(act: Callable[[], object]) -> str:
    """The words of the configuration error that an act ends in."""
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


QUESTION = {"prompt": "question"}


@pytest.mark.parametrize("name", [*FORMATS, "rows.csv", "rows.csv.gz"])
def test_every_format_gives_the_examples_of_the_jsonl_file(tmp_path: Path, name: str) -> None:
    """The same prompts, columns and keys at the same numbers, so the same tickets."""
    make = {"rows.csv": as_csv, "rows.csv.gz": lambda rows: gzip.compress(as_csv(rows))}.get(name)
    (text(make(ROWS)) if make else FORMATS[name](ROWS))(tmp_path / name)
    (tmp_path / "reference.jsonl").write_bytes(lines(ROWS))
    reference = make_dataset(JsonlConfig(path=str(tmp_path / "reference.jsonl"), prompt_column="question"), "train", 0)
    found = table(tmp_path / name, columns=QUESTION)
    assert found.num_examples == 57
    assert examples(found) == examples(reference)
    assert [one.key("x") for one in examples(found)] == [one.key("x") for one in examples(reference)]
    # a process that starts later finds the index and the conversion, and makes nothing again
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / ".prepared").glob("*.*")}
    assert examples(table(tmp_path / name, columns=QUESTION)) == examples(reference)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / ".prepared").glob("*.*")} == made


@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_a_list_in_json_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Wherever a piece ends; the file may be larger than memory."""
    monkeypatch.setattr("actors.datasets.texts.CHUNK", chunk)
    rows = [{"prompt": 'a, ] " [', "n": -12.5, "inner": [1, {"x": None}]}, {"prompt": "b"}, {"prompt": "ü" * 99}]
    (tmp_path / "rows.json").write_text(" \n" + json.dumps(rows, indent=1))
    found = examples(table(tmp_path / "rows.json"))
    assert [{"prompt": one.prompt, **one.columns} for one in found] == rows


@pytest.mark.parametrize("name", FORMATS)
def test_messages_are_messages_in_every_format(tmp_path: Path, name: str) -> None:
    """A table has every field in every row; fields without a value are none of the message's."""
    chats = [*CHATS, {"prompt": [{"role": "user", "content": "x", "name": "Ada"}], "solution": 0}]
    FORMATS[name](chats)(tmp_path / name)
    assert [one.prompt for one in examples(table(tmp_path / name))] == [chat["prompt"] for chat in chats]


def test_a_parquet_file_with_large_row_groups_is_converted_once(tmp_path: Path) -> None:
    """Decoding a group of megabytes for each row would take longer than sampling."""
    rows = [{"prompt": f"{n:06}" * 40, "solution": n} for n in range(40_000)]
    parquet(rows, 40_000)(tmp_path / "large.parquet")
    assert pq.ParquetFile(tmp_path / "large.parquet").metadata.row_group(0).total_byte_size > GROUP_BYTES
    found = table(tmp_path / "large.parquet")
    assert [found.example(n).columns["solution"] for n in (39_999, 0, 20_000)] == [39_999, 0, 20_000]
    assert len(list((tmp_path / ".prepared").glob("*.arrow"))) == 1


def test_a_folder_of_save_to_disk_is_read_without_the_library(tmp_path: Path) -> None:
    """A data set in several files, and several splits in one folder."""
    import datasets

    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:7])
    train.save_to_disk(tmp_path / "single", num_shards=3)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "splits")
    expected = [row["solution"] for row in ROWS]
    assert rows_of(table(tmp_path / "single", columns=QUESTION)) == expected
    assert rows_of(table(tmp_path / "splits", columns=QUESTION)) == expected
    held_out = table(tmp_path / "splits", "eval", columns=QUESTION, eval_split="test")
    assert rows_of(held_out) == expected[:7]
    assert "has no split 'validation'; it has train, test" in error(
        lambda: table(tmp_path / "splits", split="validation")
    )
    (tmp_path / "single" / "data-00001-of-00003.arrow").unlink()
    assert "data-00001-of-00003.arrow, which is not there" in error(lambda: table(tmp_path / "single"))


def test_a_folder_or_pattern_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Formats may be mixed; names that begin with a split belong to that split."""
    text(lines(ROWS[:20]))(tmp_path / "train-00000.jsonl")
    parquet(ROWS[20:40], 7)(tmp_path / "train-00001.parquet")
    text(gzip.compress(lines(ROWS[40:])))(tmp_path / "train-00002.jsonl.gz")
    text(lines(ROWS[:3]))(tmp_path / "test.jsonl")
    expected = [row["solution"] for row in ROWS]
    assert rows_of(table(tmp_path, columns=QUESTION)) == expected
    assert rows_of(table(tmp_path, "eval", columns=QUESTION, eval_split="test")) == expected[:3]
    folder = tmp_path / ".prepared"
    assert rows_of(table(tmp_path / "train-*", columns=QUESTION, folder=folder)) == expected
    assert "has no files of the split 'validation'" in error(lambda: table(tmp_path, split="validation"))
    assert "there is no file" in error(lambda: table(tmp_path / "nothing-*", folder=folder))
    # names that speak of no split are rows for training; a file of another split never is
    (tmp_path / "more").mkdir()
    text(lines(ROWS[:5]))(tmp_path / "more" / "test.jsonl")
    assert "has no files of the split 'train'" in error(lambda: table(tmp_path / "more"))
    text(lines(ROWS[:9]))(tmp_path / "more" / "rows.jsonl")
    assert rows_of(table(tmp_path / "more", columns=QUESTION)) == expected[:9]


def test_a_split_takes_rows_over_the_borders_of_files(tmp_path: Path) -> None:
    """Numbers and percentages count the rows of all files together."""
    for number, start in enumerate((0, 20, 40)):
        text(lines(ROWS[start : start + 20]))(tmp_path / f"{number}.jsonl")
    expected = [row["solution"] for row in ROWS]
    pattern, keys = tmp_path / "*.jsonl", {"columns": QUESTION, "folder": tmp_path / "p"}
    assert rows_of(table(pattern, split="train[15:45]", **keys)) == expected[15:45]
    assert rows_of(table(pattern, split="train[:90%]", **keys)) == expected[:51]
    assert rows_of(table(pattern, split="train[-2:]+train[:1]", **keys)) == [*expected[-2:], expected[0]]
    assert rows_of(table(pattern, "eval", eval_split="train[90%:]", **keys)) == expected[51:]
    assert rows_of(table(pattern, limit=4, **keys)) == expected[:4]
    assert "has no rows" in error(lambda: table(pattern, split="train[9:3]", **keys))
    assert "has no split 'test'; files have the split train alone" in error(lambda: table(pattern, split="test"))


def test_without_an_eval_split_nothing_is_held_out(tmp_path: Path) -> None:
    """And with another file its rows are."""
    text(lines(ROWS))(tmp_path / "rows.jsonl")
    text(lines(ROWS[:2]))(tmp_path / "held_out.jsonl")
    assert table(tmp_path / "rows.jsonl", "eval").num_examples == 0
    keys = {"columns": QUESTION, "eval_path": str(tmp_path / "held_out.jsonl")}
    assert table(tmp_path / "rows.jsonl", "eval", **keys).num_examples == 2


def test_columns_are_renamed_and_left_out(tmp_path: Path) -> None:
    """Others stay; a column that gives its name away is gone."""
    text(lines([{"id": 1, "prompt": "old", "question": "q", "answer": "a", "image": "..."}]))(tmp_path / "r.jsonl")
    columns = {"prompt": "question", "solution": "answer", "again": "answer", "image": None}
    one = table(tmp_path / "r.jsonl", columns=columns).example(0)
    assert (one.prompt, one.columns) == ("q", {"id": 1, "solution": "a", "again": "a"})
    found = error(lambda: table(tmp_path / "r.jsonl", columns={"prompt": "problem"}).example(0))
    assert f"{tmp_path / 'r.jsonl'}, row 1: no column 'problem' (columns.prompt); its columns are id, prompt" in found
    with pytest.raises(ValueError, match="every example has a prompt"):
        DatasetConfig(path="x", columns={"prompt": None})


def test_the_answer_at_the_end_of_a_conversation_is_cut(tmp_path: Path) -> None:
    """ms-swift's data have it; only there is something left to be sampled."""
    answered = [*CHATS[0]["prompt"], {"role": "assistant", "content": "1"}]
    text(lines([{"messages": answered}, {"messages": answered[2:]}]))(tmp_path / "r.jsonl")
    found = table(tmp_path / "r.jsonl", columns={"prompt": "messages"}, cut_answer=True)
    assert found.example(0).prompt == CHATS[0]["prompt"]
    assert "row 2: all messages are of the assistant" in error(lambda: found.example(1))
    assert table(tmp_path / "r.jsonl", columns={"prompt": "messages"}).example(0).prompt == answered


FILTER = """
from pathlib import Path
def hard(row):
    with open(Path(__file__).with_name("calls"), "a") as calls:
        calls.write("x")
    return row["level"] == "{level}" and len(row["prompt"]) > 0
def forgets(row):
    row["level"]
def fails(row):
    return 1 / (int(row["solution"]) - 3) < 2
def nothing(row):
    return False
"""


def test_a_filter_judges_each_row_once_for_all_processes(tmp_path: Path) -> None:
    """The numbers of the rows are kept; another code is judged again, in the same run as well."""
    parquet(ROWS, 10)(tmp_path / "rows.parquet")
    (tmp_path / "mine.py").write_text(FILTER.format(level=1))
    keys = {"columns": QUESTION, "filter": f"{tmp_path / 'mine.py'}:hard"}
    expected = [row["solution"] for row in ROWS if row["level"] == "1"]
    for _ in range(3):
        assert rows_of(table(tmp_path / "rows.parquet", **keys)) == expected
    assert len((tmp_path / "calls").read_text()) == 57
    assert rows_of(table(tmp_path / "rows.parquet", limit=3, **keys)) == expected[:3]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("forgets", "row 1 of .*: must return True or False, returned None"),
        ("fails", "row 3 of .*: ZeroDivisionError: division by zero"),
        ("nothing", "has no rows: the filter .*:nothing keeps none"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_filter_that_fails_is_named_with_the_row(tmp_path: Path, function: str, words: str) -> None:
    """Nothing is left out silently."""
    text(lines(ROWS))(tmp_path / "rows.jsonl")
    (tmp_path / "mine.py").write_text(FILTER.format(level=1))
    with pytest.raises(ConfigError, match=words):
        table(tmp_path / "rows.jsonl", columns=QUESTION, filter=f"{tmp_path / 'mine.py'}:{function}")


def test_audio_in_messages_is_refused_with_row_and_column(tmp_path: Path) -> None:
    """Parts of text are text."""
    part = {"type": "text", "text": "what is it?"}
    chats = [{"role": "user", "content": [part]}], [{"role": "user", "content": [part, {"type": "audio"}]}]
    text(lines([{"prompt": chat} for chat in chats]))(tmp_path / "r.jsonl")
    found = table(tmp_path / "r.jsonl")
    assert found.example(0).prompt == chats[0]
    words = error(lambda: found.example(1))
    assert f"{tmp_path / 'r.jsonl'}, row 2, column 'prompt': message 1 has a part of type 'audio'" in words
    assert "message 1 has a part of type 'audio'" in error(
        lambda: make_dataset(JsonlConfig(path=str(tmp_path / "r.jsonl")), "train", 0)
    )


@pytest.mark.parametrize("name", ["r.parquet", "r.arrow"])
def test_columns_of_images_are_refused_unless_they_are_named_or_left_out(tmp_path: Path, name: str) -> None:
    """The library `datasets` notes features in the schema."""
    features = {"prompt": {"dtype": "string", "_type": "Value"}, "pictures": [{"_type": "Image"}]}
    noted = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    data = pa.table({"prompt": ["a"], "pictures": [["bytes"]]}).replace_schema_metadata(noted)
    if name.endswith("parquet"):
        pq.write_table(data, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), data.schema) as writer:
            writer.write_table(data)
    words = error(lambda: table(tmp_path / name))
    assert f"{tmp_path / name} has images, audio or files in column pictures" in words
    assert "columns: {pictures: null}" in words
    assert words == error(lambda: Preview(DatasetConfig(path=str(tmp_path / name)), "train"))
    assert table(tmp_path / name, columns={"pictures": None}).example(0).columns == {}


BROKEN = {
    "cut.jsonl.gz": (gzip.compress(lines(ROWS))[:-30], "cut.jsonl.gz can't be decompressed: Compressed file ended"),
    "no.jsonl.gz": (b"plain", "no.jsonl.gz can't be decompressed: Not a gzipped file"),
    "cut.jsonl.xz": (lzma.compress(lines(ROWS))[:-30], "cut.jsonl.xz can't be decompressed"),
    "no.jsonl.zst": (b"plain", "no.jsonl.zst can't be decompressed"),
    "bad.json": (b'[{"prompt": "a"}, {"prompt"]', "bad.json, row 2: not JSON"),
    "open.json": (b'[{"prompt": "a"}', "open.json, row 2: not JSON"),
    "short.csv": (b"prompt,answer\na,b\nc\n", "short.csv, row 2: has 1 fields, and the first line names 2 columns"),
    "quote.csv": (b'prompt,answer\na,"b\n', "quote.csv, line 2: not CSV: unexpected end of data"),
    "twice.csv": (b"prompt,prompt\na,b\n", "twice.csv, line 1: two columns have the same name: prompt, prompt"),
    "empty.csv": (b"", "empty.csv, line 1: the first line must have the names"),
    "bytes.csv": (b"prompt\n\xff\xfe\n", "bytes.csv can't be read: 'utf-8' codec can't decode"),
    "no.parquet": (b"PAR1 nothing", "no.parquet is no parquet file"),
    "no.arrow": (b"nothing at all", "no.arrow is no Arrow file"),
    "none.jsonl": (b"\n\n", "none.jsonl has no rows"),
    "rows.txt": (b"text", "rows.txt is no data file; the name must end in .parquet, .arrow"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    """With the row where there is one, by a start and by a check; nothing half made stays behind."""
    data, words = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    for _ in range(2):
        assert words in error(lambda: table(tmp_path / name))
    if words.endswith(("not JSON", "columns", "data", "prompt")):
        assert words in error(lambda: Preview(DatasetConfig(path=str(tmp_path / name)), "train"))
    assert not list((tmp_path / ".prepared").glob(".*.tmp"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "row 2: no column 'prompt' (columns.prompt); its columns are text"),
        ({"prompt": 3}, "row 2: the prompt must be text, or a list of messages"),
        ({"prompt": None}, "row 2: the prompt must be text"),
        ({"prompt": []}, "row 2: the prompt must be text"),
        ([1], "row 2: no column 'prompt' (columns.prompt); it is not an object"),
    ],
)
def test_a_row_without_a_prompt_is_named_when_it_is_read(tmp_path: Path, row: Any, words: str) -> None:
    """Rows are parsed when they are drawn, and the first ones by a check."""
    text(lines([{"prompt": "a"}, row]))(tmp_path / "r.jsonl")
    found = table(tmp_path / "r.jsonl")
    assert f"{tmp_path / 'r.jsonl'}, {words}" in error(lambda: found.example(1))
    assert words.partition(": ")[2] in error(lambda: Preview(DatasetConfig(path=str(tmp_path / "r.jsonl")), "train"))


def test_a_preview_reads_the_first_rows_and_writes_nothing(tmp_path: Path) -> None:
    """It knows the columns that each row has, and whether there are more rows."""
    rows = [{"prompt": "a", "x": 1, "y": n} if n < 150 else {"text": "faulty"} for n in range(200)]
    for name in ("r.jsonl", "r.jsonl.gz"):
        FORMATS["rows." + name.partition(".")[2]](rows)(tmp_path / name)
        preview = Preview(DatasetConfig(path=str(tmp_path / name), columns={"y": None}), "train")
        assert (preview.num_read, preview.columns) == (100, {"x"})
        assert (preview.num_examples or 0) > 100
    assert {file.name for file in tmp_path.iterdir()} == {"r.jsonl", "r.jsonl.gz"}


def changes(folder: Path, before: Any, path: Path, **keys: Any) -> list[str]:
    """The refusals of a start with this data; a look before the start gives the same, but for filters."""
    now = table(path, folder=folder, **keys)
    refused, told = data_changes(before, {"x": now})
    assert told == []
    looked = data_changes(before, {"x": Source(DatasetConfig(path=str(path), **keys), "train", Prepared(folder))})[0]
    assert looked == ([] if keys.get("filter") else refused)
    return refused


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """One answer among many; the same bytes, written again, are the same data."""
    path, folder = tmp_path / name, tmp_path / "prepared"
    FORMATS[name](ROWS)(path)
    before = json.loads(json.dumps(identities({"x": table(path, folder=folder)})))
    assert before["x"]["rows"] == 57
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert changes(folder, before, path) == []
    FORMATS[name]([*ROWS[:-1], ROWS[-1] | {"solution": "58"}])(path)
    (refused,) = changes(folder, before, path)
    assert f"environments[].path: {path} is not the data of this run: so far {len(content)} bytes" in refused
    assert refused.endswith("this makes another run (--fork, or another output_dir)")


def test_files_that_come_or_go_are_refused(tmp_path: Path) -> None:
    """Rows behind them would have other numbers."""
    folder, pattern = tmp_path / "prepared", tmp_path / "*.jsonl"
    for number in (1, 2):
        text(lines(ROWS[:number]))(tmp_path / f"{number}.jsonl")
    before = identities({"x": table(pattern, folder=folder)})
    text(lines(ROWS[:3]))(tmp_path / "3.jsonl")
    (refused,) = changes(folder, before, pattern)
    assert f"{tmp_path / '3.jsonl'} is not in the data of this run" in refused
    (tmp_path / "3.jsonl").unlink()
    (tmp_path / "2.jsonl").unlink()
    (refused,) = changes(folder, before, pattern)
    assert f"{tmp_path / '2.jsonl'} was in the data of this run, and is not now" in refused


def test_a_filter_that_keeps_other_rows_is_refused(tmp_path: Path) -> None:
    """Code that keeps the same rows is no change."""
    folder, path = tmp_path / "prepared", tmp_path / "rows.jsonl"
    text(lines(ROWS))(path)
    (tmp_path / "mine.py").write_text(FILTER.format(level=1))
    keys = {"columns": QUESTION, "filter": f"{tmp_path / 'mine.py'}:hard"}
    before = identities({"x": table(path, folder=folder, **keys)})
    (tmp_path / "mine.py").write_text(FILTER.format(level=1) + "# a comment\n")
    assert changes(folder, before, path, **keys) == []
    # another module of the same name in this process: Python keeps the one that was imported
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "mine.py").write_text(FILTER.format(level=2))
    keys["filter"] = f"{tmp_path / 'again' / 'mine.py'}:hard"
    (refused,) = changes(folder, before, path, **keys)
    assert "mine.py:hard keeps other rows" in refused
    assert "19 rows so far, 19 now" in refused


def test_a_file_that_is_replaced_while_it_is_read_stays_what_it_was(tmp_path: Path) -> None:
    """The index fits the file that was opened."""
    for name in ("rows.jsonl", "rows.parquet", "rows.arrow"):
        FORMATS[name](ROWS)(tmp_path / name)
        found = table(tmp_path / name, columns=QUESTION)
        FORMATS[name](ROWS[::-1])(tmp_path / f"new-{name}")
        (tmp_path / f"new-{name}").replace(tmp_path / name)
        assert rows_of(found) == [row["solution"] for row in ROWS]


def test_keys_of_the_hub_are_refused_for_files(tmp_path: Path) -> None:
    """They would have no effect."""
    text(lines(ROWS))(tmp_path / "r.jsonl")
    assert "environments[].revision: " in error(lambda: table(tmp_path / "r.jsonl", revision="main"))
    assert "environments[].config: " in error(lambda: table(tmp_path / "r.jsonl", config="main"))
