"""A tiny stock model, checkpoints of it in run folders, and tiny evaluation sets."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from openclip_linattn.cli.evaluate import evaluate_command
from openclip_linattn.zeroshot.checkpoints import find_checkpoints
from openclip_linattn.zeroshot.encoders.models import LoadedModel, load_model

MODEL = "zeroshot-test-vit"
COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
SHAPES = ("disk", "bar")
TEMPLATES = ("a photo of a {c}", "{} on black", "the {c}, drawn")

Sample = dict[str, bytes]


@pytest.fixture(scope="session", autouse=True)
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Adds a small stock model to OpenCLIP, and takes it away again."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    }
    path = tmp_path_factory.mktemp("configs") / f"{MODEL}.json"
    path.write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
        patch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
        open_clip.add_model_config(path)
        yield MODEL


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def encode(color: str, shape: str, seed: int, kind: str = "png") -> bytes:
    """Draw one noisy 40 x 36 image."""
    pixels = np.random.default_rng(seed).integers(0, 60, (36, 40, 3))
    box = (slice(8, 28), slice(10, 30)) if shape == "disk" else (slice(15, 21), slice(2, 38))
    pixels[box] = pixels[box] // 2 + np.array(COLORS[color])[None, None] // 2
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, {"png": "PNG", "jpg": "JPEG"}[kind])
    return out.getvalue()


def samples(count: int, kind: str = "png") -> dict[str, Sample]:
    """`count` samples by key, with cls into "color shape" names and json fields."""
    names = [(color, shape) for color in COLORS for shape in SHAPES]
    rng = np.random.default_rng(7)
    made = {}
    for number in range(count):
        label = int(rng.integers(len(names)))
        color, shape = names[label]
        made[f"{number:06d}"] = {
            kind: encode(color, shape, number, kind),
            "cls": str(label).encode(),
            "json": json.dumps({"color": color, "shape": shape, "number": number}).encode(),
        }
    return made


def write_tar(path: Path, content: Mapping[str, Mapping[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, members in content.items():
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_set(folder: Path, content: Mapping[str, Mapping[str, bytes]], shards: int = 2) -> Path:
    """Write an evaluation set in clip_benchmark's layout with three label sets."""
    test = folder / "test"
    test.mkdir(parents=True)
    keys = list(content)
    for number in range(shards):
        write_tar(test / f"{number}.tar", {key: content[key] for key in keys[number::shards]})
    (test / "nshards.txt").write_text(f"{shards}\n")
    names = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
    (folder / "classnames.txt").write_text("\n".join(names) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    sets = {
        "color x shape": {"classes": names, "fields": ["color", "shape"]},
        "color": {"classes": list(COLORS), "fields": ["color"]},
        "shape": {"classes": list(SHAPES), "fields": ["shape"]},
    }
    (folder / "label_sets.json").write_text(
        json.dumps({name: {**entry, "templates": list(TEMPLATES)} for name, entry in sets.items()})
    )
    return folder


def save_checkpoint(run: Path, epoch: int | str, seed: int, *, params: bool = True, prefix: str = "") -> Path:
    """Save random weights as OpenCLIP does, in `run`/checkpoints, with params.txt above."""
    torch.manual_seed(seed)
    model = open_clip.create_model(MODEL)
    state = {prefix + key: value for key, value in model.state_dict().items()}
    folder = run / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch_{epoch}.pt"
    number = epoch if isinstance(epoch, int) else 7
    torch.save({"epoch": number, "name": run.name, "state_dict": state, "optimizer": {}}, path)
    if params:
        (run / "params.txt").write_text(f"batch_size: 8\nforce_image_size: None\nmodel: {MODEL}\nseed: 0\n")
    return path


@pytest.fixture
def make() -> Any:
    """The makers above, for tests that need faulty or other sets."""

    class Make:
        model = MODEL
        colors = COLORS
        shapes = SHAPES
        templates = TEMPLATES
        samples: Callable[..., dict[str, Sample]] = staticmethod(samples)
        tar = staticmethod(write_tar)
        set = staticmethod(write_set)
        checkpoint = staticmethod(save_checkpoint)

    return Make


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 images in 3 shards; read only."""
    return write_set(tmp_path_factory.mktemp("data") / "figures", samples(45), shards=3)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """A run with epochs 2, 10 and latest; copy before writing into it."""
    run = tmp_path_factory.mktemp("logs") / "first"
    for seed, epoch in enumerate((10, 2, "latest")):
        save_checkpoint(run, epoch, seed)
    return run


@pytest.fixture(scope="session")
def checkpoint(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "epoch_2.pt"


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(find_checkpoints([checkpoint])[0], device=torch.device("cpu"), precision="fp32")


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    """A run to write into."""
    return Path(shutil.copytree(run_folder, tmp_path / "logs" / "first"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints for which a model gets built."""
    built: list[str] = []

    def build(checkpoint: Any, **rest: Any) -> LoadedModel:
        built.append(checkpoint.path.name)
        return load_model(checkpoint, **rest)

    monkeypatch.setattr("openclip_linattn.zeroshot.checkpoint_rows.load_model", build)
    return built


@pytest.fixture
def runs(tmp_path: Path, make: Any) -> list[Path]:
    """Two runs with epochs 1 and 2."""
    folders = [tmp_path / "logs" / name for name in ("a", "b")]
    for number, folder in enumerate(folders):
        for epoch in (1, 2):
            make.checkpoint(folder, epoch, seed=10 * number + epoch)
    return folders


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on one label set of the shapes, without workers."""
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(evaluate_command)

    def call(*arguments: object) -> Result:
        plain = ("--workers", 0, "--label-set", "color x shape")
        return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *plain)])

    return call
