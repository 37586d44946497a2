"""download.sh with the real img2dataset and a server of good, broken, slow, forbidden and missing images."""

import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

SCRIPTS = Path(__file__).parents[2] / "scripts" / "laion400m"
ROWS = {"good": 20, "broken": 3, "slow": 2, "forbidden": 2, "missing": 4}
LAION_COLUMNS = """
import json, sys
import pyarrow, pyarrow.parquet
pyarrow.parquet.write_table(pyarrow.table(json.load(sys.stdin)), sys.argv[1])
"""


def stats(folder: Path, number: int, successes: int, **reasons: int) -> None:
    count = successes + sum(reasons.values())
    (folder / f"{number:05}_stats.json").write_text(
        json.dumps(
            {
                "count": count,
                "successes": successes,
                "failed_to_download": count - successes,
                "failed_to_resize": 0,
                "status_dict": {"success": successes, **reasons},
            }
        )
    )
    (folder / f"{number:05}.tar").touch()


def account(run, folder: Path):
    return run(sys.executable, SCRIPTS / "download_account.py", folder)


def test_the_account_adds_the_shards_up_and_names_the_commonest_reasons_first(run, tmp_path):
    stats(tmp_path, 0, 6, timeout=1, gone=3)
    stats(tmp_path, 1, 9, timeout=1)
    result = account(run, tmp_path)
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        f"{tmp_path}: 20 rows, 15 downloaded, 5 failed to download, 0 were no readable image",
        "  3 (15.0%): gone",
        "  2 (10.0%): timeout",
    ]


def test_an_unfinished_shard_and_an_empty_download_are_errors(run, tmp_path):
    nothing = account(run, tmp_path)
    assert (nothing.returncode, nothing.stderr) == (1, "error: nothing was downloaded\n")
    stats(tmp_path, 0, 6)
    (tmp_path / "00001.tar").touch()
    unfinished = account(run, tmp_path)
    assert unfinished.returncode == 1
    assert "not finished: 00001.tar;" in unfinished.stderr


class Images(BaseHTTPRequestHandler):
    """Serves /good/..., /forbidden/..., /broken/... and /slow/..., and nothing else."""

    picture = b""
    asked: ClassVar[list[str]] = []  # a list, for several threads add to it
    release = threading.Event()

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        self.asked.append(kind)
        if kind not in ROWS or kind == "missing":
            self.send_error(404)
            return
        body = b"<html>moved</html>" if kind == "broken" else self.picture
        self.send_response(200)
        if kind == "forbidden":
            self.send_header("X-Robots-Tag", "noai")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind == "slow":
            self.release.wait(60)
            return
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    noise = np.random.default_rng(0).integers(0, 255, (120, 200, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    Images.picture = buffer.getvalue()
    Images.asked.clear()
    Images.release.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Images) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        Images.release.set()
        running.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def img2dataset(run) -> Path:
    """The Python of img2dataset's own environment, which download.sh makes in the checkout and keeps."""
    script = SCRIPTS / "img2dataset.sh"
    result = run("bash", "-c", f'set -e; source "{script}"; echo "$IMG2DATASET"')
    if result.returncode != 0:
        pytest.skip(f"img2dataset cannot be installed here: {result.stderr.strip().splitlines()[-1]}")
    return Path(result.stdout.strip(), "bin", "python")


def write_list(python: Path, url: str, parquet: Path) -> None:
    """A parquet file with LAION-400M's columns."""
    parquet.parent.mkdir()
    kinds = [kind for kind, number in ROWS.items() for _ in range(number)]
    columns = {
        "SAMPLE_ID": [float(row) for row in range(len(kinds))],
        "URL": [f"{url}/{kind}/{row}.jpg" for row, kind in enumerate(kinds)],
        "TEXT": [f"picture {row}" for row in range(len(kinds))],
        "HEIGHT": [120] * len(kinds),
        "WIDTH": [200] * len(kinds),
        "LICENSE": ["?"] * len(kinds),
        "NSFW": ["UNLIKELY"] * len(kinds),
        "similarity": [0.31] * len(kinds),
    }
    subprocess.run(
        [str(python), "-c", LAION_COLUMNS, str(parquet)],
        input=json.dumps(columns),
        text=True,
        check=True,
        timeout=60,
    )


@pytest.mark.slow
def test_what_can_be_downloaded_becomes_shards_that_the_check_accepts(run, img2dataset, server, tmp_path):
    lists, shards = tmp_path / "the lists", tmp_path / "the shards"
    write_list(img2dataset, server, lists / "part-00000.parquet")
    command = ("bash", SCRIPTS / "download.sh", lists, shards)
    limits = {"PROCESSES": "1", "THREADS": "8", "TIMEOUT": "1"}

    result = run(*command, **limits)
    assert result.returncode == 0, result.stderr
    counted = json.loads((shards / "00000_stats.json").read_text())
    assert (counted["count"], counted["successes"]) == (sum(ROWS.values()), ROWS["good"])
    assert counted["status_dict"] == {
        "success": ROWS["good"],
        "Image decoding error": ROWS["broken"],
        "timed out": ROWS["slow"],
        "Use of image disallowed by X-Robots-Tag directive": ROWS["forbidden"],
        "HTTP Error 404: Not Found": ROWS["missing"],
    }
    assert Images.asked.count("missing") == 3 * ROWS["missing"]  # two retries each
    with tarfile.open(shards / "00000.tar") as tar:
        kept = json.loads(tar.extractfile("000000000.json").read())
        assert Image.open(tar.extractfile("000000000.jpg")).size == (256, 256)
    assert [kept[key] for key in ("caption", "NSFW", "similarity", "LICENSE", "original_width")] == [
        *("picture 0", "UNLIKELY", 0.31, "?", 200)
    ]

    check = run("bash", SCRIPTS / "check.sh", shards)
    assert check.returncode == 0, check.stdout + check.stderr
    (report,) = json.loads(Path(f"{shards}.check.json").read_text())
    assert (report["samples"], report["usable"]) == (ROWS["good"], ROWS["good"])
    assert (shards / "sizes.json").exists()

    before = len(Images.asked)
    again = run(*command, **limits)
    assert again.returncode == 0, again.stderr
    assert len(Images.asked) == before


@pytest.mark.slow
def test_lists_that_cannot_be_downloaded_are_refused_before_anything_is(run, img2dataset, tmp_path):
    lists, shards = tmp_path / "lists", tmp_path / "shards"
    write_list(img2dataset, "http://127.0.0.1:9", lists / "0.parquet")
    (lists / "1.parquet").write_text("no parquet at all")
    (tmp_path / "empty").mkdir()

    def refused(*arguments: Path, **more: str) -> str:
        result = run("bash", SCRIPTS / "download.sh", *arguments, shards, **more)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
        assert not shards.exists()
        return result.stderr

    assert f"{tmp_path}/empty has no .parquet files" in refused(tmp_path / "empty")
    assert f"{tmp_path}/none cannot be read" in refused(tmp_path / "none")
    assert f"{lists}/1.parquet cannot be read" in refused(lists)
    missing = refused(lists / "0.parquet", KEEP='["punsafe","NSFW"]', CAPTION_COLUMN="caption")
    assert "0.parquet has no column caption, punsafe, but SAMPLE_ID, URL, TEXT," in missing
    assert "KEEP must be a list" in refused(lists / "0.parquet", KEEP="NSFW,LICENSE")
