"""Images at URLs: downloaded from a real server when a data set is opened, once for a run, from allowed origins."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.datasets import Dataset, downloads, make_dataset
from actors.datasets.images import UNSEEN, file_name
from actors.datasets.prepared import Prepared
from actors.datasets.supervised import SupervisedRows
from schemas.config.data import DatasetConfig, JsonlConfig
from schemas.config.sft import SftConfig
from schemas.errors import ConfigError
from tests.actors.datasets.pictures import hostile, picture
from tests.actors.datasets.web import Web, serving

RED, BLUE = picture(40, 30), picture(20, 50, "JPEG")
OPEN = """
import sys
from pathlib import Path
from actors.datasets import make_dataset
from actors.datasets.prepared import Prepared
from schemas.config.data import JsonlConfig
rows, run, origin = sys.argv[1:]
config = JsonlConfig(path=rows, images={"origins": [origin]})
dataset = make_dataset(config, "train", 0, prepared=Prepared(Path(run)))
print(*(dataset.example(index).key("e") for index in range(dataset.num_examples)))
"""


@pytest.fixture
def web() -> Iterator[Web]:
    """A server without pages."""
    with serving() as web:
        yield web


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE_SECONDS", 0.001)


def row(image: Any, **columns: Any) -> dict[str, Any]:
    """A row with a question about an image."""
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it?"}]
    return {"prompt": [{"role": "user", "content": parts}], **columns}


def opened(folder: Path, web: Web, *rows: dict[str, Any], check: bool = True, **images: Any) -> Dataset:
    """The data set of rows in a JSON Lines file, opened by the run of a folder."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = JsonlConfig(path=str(folder / "rows.jsonl"), images={"origins": [web.origin], **images})
    return make_dataset(config, "train", 0, check, prepared=Prepared(folder / "run"))


def refused(folder: Path, web: Web, *rows: dict[str, Any], **images: Any) -> list[str]:
    """Why a data set can't be opened."""
    with pytest.raises(ConfigError) as caught:
        opened(folder, web, *rows, **images)
    return caught.value.problems


def kept(folder: Path) -> dict[str, bytes]:
    """Files of images that a run has."""
    found = (folder / "run/images").glob("*")
    return {file.name: file.read_bytes() for file in found if file.suffix != ".urls" and file.name != ".lock"}


@pytest.mark.parametrize("number", [1, 20, 500])
def test_images_at_urls_give_the_examples_of_the_same_files_by_path(tmp_path: Path, web: Web, number: int) -> None:
    """To the key, the bytes and the columns; each image is asked for once, by the first process that opens the data."""
    files = {f"/{index}.png": picture(1 + index % 40, 1 + index // 40) for index in range(number)}
    web.pages = {**files}
    (tmp_path / "pictures").mkdir()
    for name, data in files.items():
        (tmp_path / f"pictures{name}").write_bytes(data)
    # each image in two rows
    names = [*files, *files]
    by_path = opened(tmp_path, web, *(row(f"pictures{name}", answer=name) for name in names), origins=[])
    wanted = [by_path.example(index) for index in range(2 * number)]
    for check in (True, False):
        dataset = opened(tmp_path, web, *(row(web.url(name), answer=name) for name in names), check=check)
        found = [dataset.example(index) for index in range(2 * number)]
        assert found == wanted
        assert [one.key("e") for one in found] == [one.key("e") for one in wanted]
        assert sorted(web.asked) == sorted(files)
    assert kept(tmp_path) == {file_name(web.url(name)): data for name, data in files.items()}


def test_a_column_of_a_table_has_urls_of_its_chosen_rows(tmp_path: Path, web: Web) -> None:
    """By its new name, in parts of messages too; rows that the run does not read cost no request."""
    web.pages = {"/red.png": RED, "/blue.jpg": BLUE}
    shots = [[web.url("/red.png"), web.url("/blue.jpg")], [web.url("/none.png")], [web.url("/blue.jpg")]]
    pq.write_table(pa.table({"question": ["a", "b", "c"], "shots": shots}), tmp_path / "rows.parquet")
    config = DatasetConfig(
        path=str(tmp_path / "rows.parquet"),
        split="train[:1]",
        eval_split="train[2:]",
        columns={"prompt": "question", "pictures": "shots"},
        images={"column": "pictures", "origins": [web.origin]},
    )
    prepared = Prepared(tmp_path / "run")
    (train, held_out) = (make_dataset(config, split, 0, prepared=prepared) for split in ("train", "eval"))
    assert [image.data for image in train.example(0).images] == [RED, BLUE]
    assert [image.data for image in held_out.example(0).images] == [BLUE]
    assert sorted(web.asked) == ["/blue.jpg", "/red.png"]


def test_supervised_rows_have_images_at_urls(tmp_path: Path, web: Web) -> None:
    """With origins of their own, in `trainer.sft.images`."""
    web.pages = {"/red.png": RED}
    rows = [row(web.url("/red.png"), completion="red"), {"prompt": "1+1=", "completion": "2"}]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    keys = {"batch_size": 1, "mu_peak": 0.5, "mu_valley": 0.5, "mu_warmup_steps": 0, "mu_decay_steps": 0}

    def samples(*origins: str) -> SupervisedRows:
        sft = SftConfig(path=str(tmp_path / "sft.jsonl"), images={"origins": [*origins]}, **keys)
        return SupervisedRows(sft, Prepared(tmp_path / "run"))

    assert [image.data for image in samples(web.origin).example(0).images] == [RED]
    with pytest.raises(ConfigError, match=r"line 1: image 1 is at .*trainer\.sft\.images\.origins does not name"):
        samples().example(0)
    with pytest.raises(ConfigError, match=r"sft\.jsonl, line 1: an image is at .*trainer\.sft\.images\.origins"):
        samples("https://example.com")
    assert web.asked == ["/red.png"]


def test_a_run_keeps_its_images_when_it_continues(tmp_path: Path) -> None:
    """Though the server has others now, or is gone; rows added at the end are downloaded alone."""
    with serving() as web:
        web.pages = {"/a.png": RED, "/b.png": BLUE}
        first = opened(tmp_path, web, row(web.url("/a.png"))).example(0)
        web.pages["/a.png"] = BLUE
        assert opened(tmp_path, web, row(web.url("/a.png"))).example(0) == first
        more = opened(tmp_path, web, row(web.url("/a.png")), row(web.url("/b.png")))
        assert [more.example(index).images[0].data for index in range(2)] == [RED, BLUE]
        assert web.asked == ["/a.png", "/b.png"]
    again = opened(tmp_path, web, row(web.url("/a.png")), row(web.url("/b.png")))
    assert [again.example(index) for index in range(2)] == [more.example(index) for index in range(2)]


def test_processes_that_open_a_data_set_at_once_download_it_once(tmp_path: Path, web: Web) -> None:
    """The first one downloads, the others wait; all have the same examples."""
    web.pages = {f"/{index}.png": picture(2 + index, 9) for index in range(30)}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row(web.url(name))) + "\n" for name in web.pages))
    command = [sys.executable, "-c", OPEN, str(rows), str(tmp_path / "run"), web.origin]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].splitlines()[-1].split() for process in processes]
    assert said[0] == said[1] == said[2]
    assert len({*said[0]}) == 30
    assert sorted(web.asked) == sorted(web.pages)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "http://localhost:9/a.png",
        "http://127.0.0.1@example.com/a.png",
        "http://example.com/a.png",
        "file:///etc/passwd",
        "https://127.0.0.1:80/a b.png",
    ],
)
def test_a_url_of_another_origin_is_refused_before_any_request(tmp_path: Path, web: Web, url: str) -> None:
    """By row, URL and what to do; images of rows in front of it are not asked for either."""
    web.pages = {"/red.png": RED}
    (told,) = refused(tmp_path, web, row(web.url("/red.png")), row(url))
    assert told.startswith(f"environments[].path: {tmp_path / 'rows.jsonl'}, line 2: an image is at {url!r}, ")
    assert told.endswith("download it next to the data")
    assert web.asked == []


def test_without_origins_a_url_is_refused_by_the_key(tmp_path: Path, web: Web) -> None:
    """The text has the origin as the key takes it."""
    (told,) = refused(tmp_path, web, row(web.url("/red.png")), origins=[])
    assert f"image 1 is at '{web.url('/red.png')}', and environments[].images.origins does not name " in told
    assert f"does not name {web.origin}; add it there" in told
    assert web.asked == []


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (206, 1), (408, 5), (429, 5), (500, 5), (503, 5)])
def test_a_failure_is_told_by_row_url_and_status(tmp_path: Path, web: Web, status: int, requests: int) -> None:
    """An answer that may pass is asked for again; nothing is kept."""
    web.pages = {"/red.png": RED, "/a.png": status}
    (told,) = refused(tmp_path, web, row(web.url("/red.png")), row(web.url("/a.png")))
    assert f"rows.jsonl, line 2: the image at '{web.url('/a.png')}' is answered {status}" in told
    assert web.asked.count("/a.png") == requests
    assert kept(tmp_path) == {file_name(web.url("/red.png")): RED}


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_failure_that_passes_is_no_failure(tmp_path: Path, web: Web, status: int) -> None:
    """The third try is good."""
    web.pages = {"/a.png": [status, status, RED]}
    assert opened(tmp_path, web, row(web.url("/a.png"))).example(0).images[0].data == RED
    assert web.asked == ["/a.png"] * 3


def test_a_server_that_is_gone_is_told_in_words(tmp_path: Path) -> None:
    """The connection is tried again first."""
    with serving() as web:
        pass
    (told,) = refused(tmp_path, web, row(web.url("/a.png")))
    assert f"line 1: the image at '{web.url('/a.png')}' can't be downloaded: " in told
    assert told.endswith("in 5 tries")


def test_an_answer_that_is_cut_off_is_asked_for_again(tmp_path: Path, web: Web) -> None:
    """Half of an image must not be kept as its whole."""

    def half(request: Any) -> None:
        web.pages["/a.png"] = RED
        request.send_response(200)
        request.send_header("Content-Length", str(len(RED)))
        request.end_headers()
        request.wfile.write(RED[: len(RED) // 2])

    web.pages = {"/a.png": half}
    assert opened(tmp_path, web, row(web.url("/a.png"))).example(0).images[0].data == RED


def test_an_image_without_end_is_read_to_the_limit(tmp_path: Path, web: Web) -> None:
    """Not a second time, since it would be as large again."""
    web.pages = {"/a.png": web.endless(0.0)}
    (told,) = refused(tmp_path, web, row(web.url("/a.png")), max_bytes=100_000)
    assert f"the image at '{web.url('/a.png')}' has 1" in told
    assert told.endswith("bytes, and environments[].images.max_bytes is 100000")
    assert web.asked == ["/a.png"]


def test_a_slow_image_without_end_is_given_up(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not extend the time."""
    monkeypatch.setattr(downloads, "SECONDS", 0.3)
    monkeypatch.setattr(downloads, "TRIES", 2)
    web.pages = {"/a.png": web.endless(0.05)}
    (told,) = refused(tmp_path, web, row(web.url("/a.png")))
    assert f"the image at '{web.url('/a.png')}' has not come within 0.3 seconds, in 2 tries" in told
    assert web.asked == ["/a.png"] * 2


def test_redirects_stay_on_allowed_origins(tmp_path: Path, web: Web) -> None:
    """Another server is not asked until its origin is allowed; the file has the name of the row's URL."""
    with serving() as other:
        web.pages = {"/a.png": "b/c.png", "/b/c.png": other.url("/d.png")}
        other.pages = {"/d.png": RED}
        (told,) = refused(tmp_path, web, row(web.url("/a.png")))
        assert f"the image at '{web.url('/a.png')}' is redirected: it is at '{other.url('/d.png')}'" in told
        assert f"environments[].images.origins does not name {other.origin}" in told
        assert other.asked == []
        found = opened(tmp_path, web, row(web.url("/a.png")), origins=[web.origin, other.origin])
    assert found.example(0).images[0].data == RED
    assert kept(tmp_path) == {file_name(web.url("/a.png")): RED}


def test_redirects_without_end_are_given_up(tmp_path: Path, web: Web) -> None:
    """After five of them."""
    web.pages = {"/a.png": "/a.png"}
    (told,) = refused(tmp_path, web, row(web.url("/a.png")))
    assert "is redirected more than 5 times" in told
    assert len(web.asked) == 6


@pytest.mark.parametrize(("kind", "data"), [*hostile(16)])
def test_content_that_is_no_usable_image_is_not_kept(tmp_path: Path, web: Web, kind: str, data: bytes) -> None:
    """The same checks as for a file by path, with the URL, before the run's first step."""
    web.pages = {"/a.png": data}
    (told,) = refused(tmp_path, web, row(web.url("/a.png")), max_bytes=1 << 20, max_pixels=1_000_000)
    assert f"rows.jsonl, line 1: the image at '{web.url('/a.png')}' " in told, kind
    assert kept(tmp_path) == {}


def test_several_failures_are_told_and_no_more_asked_for(tmp_path: Path, web: Web) -> None:
    """The next start goes on with the images that are there."""
    web.pages = {f"/{index}.png": picture(2 + index, 9) for index in range(3)}
    rows = [row(web.url(f"/{index}.png")) for index in range(60)]
    told = refused(tmp_path, web, *rows)
    assert 5 <= len(told) <= 5 + downloads.CONNECTIONS
    assert all("is answered 404" in one for one in told)
    assert len(web.asked) <= 3 + 5 + downloads.CONNECTIONS
    web.asked.clear()
    web.pages |= {f"/{index}.png": RED for index in range(3, 60)}
    opened(tmp_path, web, *rows)
    assert sorted(web.asked) == sorted(f"/{index}.png" for index in range(3, 60))


def test_requests_have_no_cookies_and_no_credentials(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the server sets a cookie, and the user's home has a password for it. A signed URL arrives as written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    web.pages = {f"/%7E{index}.png?sign=%2Bab%2f=": RED for index in range(20)}
    opened(tmp_path, web, *(row(web.url(path)) for path in web.pages))
    assert sorted(web.asked) == sorted(web.pages)
    assert not {"cookie", "authorization", "referer"} & set().union(*web.headers)


def test_a_check_before_the_run_downloads_nothing(tmp_path: Path, web: Web) -> None:
    """An image of an allowed origin is not looked at; other origins are refused."""
    path = tmp_path / "rows.jsonl"
    config = JsonlConfig(path=str(path), images={"origins": [web.origin]})
    path.write_text(json.dumps(row(web.url("/a.png"))))
    assert make_dataset(config, "train", 0).example(0).images == (UNSEEN,)
    path.write_text(json.dumps(row("https://example.com/a.png")))
    with pytest.raises(ConfigError, match=r"images\.origins does not name https://example\.com"):
        make_dataset(config, "train", 0)
    assert web.asked == []
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_file_that_was_removed_is_named(tmp_path: Path, web: Web) -> None:
    """With the folder, so that it can be removed as a whole."""
    web.pages = {"/a.png": RED}
    dataset = opened(tmp_path, web, row(web.url("/a.png")))
    (tmp_path / "run/images" / file_name(web.url("/a.png"))).unlink()
    with pytest.raises(ConfigError, match=rf"was downloaded to {tmp_path}/run/images, which can't be read: No such"):
        dataset.example(0)


def test_faulty_rows_are_told_when_they_are_read(tmp_path: Path, web: Web) -> None:
    """A search for URLs passes over them."""
    rows = [row(web.url("/a.png")), {"prompt": [1]}, {"prompt": None}, {}, row({"url": 7}), row([web.url("/b.png")])]
    web.pages = {"/a.png": RED}
    dataset = opened(tmp_path, web, *rows, check=False)
    assert dataset.example(0).images[0].data == RED
    for index in range(1, len(rows)):
        with pytest.raises(ConfigError, match=r"environments\[\]\.path"):
            dataset.example(index)
    assert web.asked == ["/a.png"]


def test_a_proxy_of_the_environment_is_for_other_machines(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for a connection to the origin's port; an image of this machine does not pass by it."""
    web.pages = {"/a.png": RED}
    with serving() as proxy:
        for name in ("https_proxy", "http_proxy"):
            monkeypatch.setenv(name, proxy.origin)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        far = "https://data.example.com:8443"
        (told,) = refused(tmp_path, web, row(web.url("/a.png")), row(f"{far}/b.png"), origins=[web.origin, far])
        assert f"line 2: the image at '{far}/b.png' can't be downloaded: 404" in told
        assert {*proxy.asked} == {"data.example.com:8443"}
    assert web.asked == ["/a.png"]
