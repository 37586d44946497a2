"""Synthetic run folders in OpenCLIP's formats, written by the tests themselves."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

MODEL = """CLIP(
  (visual): VisionTransformer(
    (conv1): Conv2d(3, {width}, kernel_size=(16, 16), stride=(16, 16), bias=False)
    (patch_dropout): Identity()
    (ln_pre): LayerNorm(({width},), eps=1e-05, elementwise_affine=True, bias=True)
    (transformer): Transformer(
      (resblocks): ModuleList(
        (0-{last}): {layers} x ResidualAttentionBlock(
          (attn): {image_attention}
          (ls_1): Identity()
          (mlp): Sequential(
            (c_fc): Linear(in_features={width}, out_features={hidden}, bias=True)
          )
        )
      )
    )
    (ln_post): LayerNorm(({width},), eps=1e-05, elementwise_affine=True, bias=True)
  )
  (transformer): Transformer(
    (resblocks): ModuleList(
      (0): ResidualAttentionBlock(
        (attn): MultiheadAttention(
          (out_proj): NonDynamicallyQuantizableLinear(in_features=64, out_features=64, bias=True)
        )
        (mlp): Sequential(
          (c_fc): Linear(in_features=64, out_features=256, bias=True)
        )
      )
    )
  )
  (token_embedding): Embedding(49408, 64)
  (ln_final): LayerNorm((64,), eps=1e-05, elementwise_affine=True, bias=True)
)"""


def model_text(kind: str = "linear", width: int = 64, layers: int = 2) -> str:
    """What OpenCLIP prints for a tiny model whose image tower has this attention."""
    attention = (
        "MultiheadAttention("
        if kind == "softmax"
        else f"LinearAttention(\n            kind={kind}, causal=False, heads=2"
    )
    return MODEL.format(
        width=width,
        hidden=4 * width,
        layers=layers,
        last=layers - 1,
        image_attention=attention + "\n          )",
    )


@dataclass
class LogWriter:
    """Builds an out.log as version 3 ("3") or 4 ("4") of OpenCLIP writes it."""

    version: str = "3"
    lines: list[str] = field(default_factory=list)
    time: datetime = datetime(2026, 1, 31, 12, 0, 0)

    def line(self, text: str, logger: str = "open_clip_train.main", seconds: float = 1.0) -> None:
        self.time += timedelta(seconds=seconds)
        stamp = self.time.strftime("%Y-%m-%d,%H:%M:%S")
        column = f"{logger} | " if self.version == "4" else ""
        self.lines.append(f"{stamp} | INFO | {column}{text}")

    def process(
        self, params: dict[str, Any], model: str | None = None, size: int = 64, resumed: bool = False
    ) -> None:
        if resumed:
            self.line("Found latest resume checkpoint at logs/run/checkpoints/epoch_latest.pt.")
        self.line("Running with a single process. Device cpu.")
        self.line(f"Final image preprocessing configuration set: {{'size': ({size}, {size}), 'mode': 'RGB'}}")
        self.line("Model:")
        self.line(model or model_text())
        self.line("Params:")
        for key, value in params.items():
            self.line(f"  {key}: {value}", seconds=0)

    def train(self, epoch: int, seen: int, total: int, loss: Any, rate: float = 0.0005) -> None:
        digits = len(str(total + 1))
        text = loss if isinstance(loss, str) else f"{loss:#.5g} ({loss:#.5g})"
        percent = f"{100 * seen / total:.0f}" if total else "inf"
        self.line(
            f"Train Epoch: {epoch} [{seen:>{digits}}/{total} ({percent}%)] Data (t): 0.080 Batch (t): 0.212, "
            f"37.7109/s, 37.7109/s/gpu LR: {rate:5f} Logit Scale: 14.286 "
            f"Contrastive_loss: {text} Loss: {text}",
            "open_clip_train.train",
        )

    def epoch(self, epoch: int, batch: int, total: int, losses: Sequence[Any]) -> None:
        self.line(f"Start epoch {epoch}")
        for index, loss in enumerate(losses):
            self.train(epoch, min(total, (index + 1) * batch), total, loss)

    def evaluation(self, epoch: int, **metrics: float) -> None:
        metrics = {**metrics, "epoch": epoch, "num_samples": 40}
        self.line("Eval Epoch: " + f"{epoch} " + "\t".join(f"{k}: {v:.4f}" for k, v in metrics.items()))

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


PARAMS = {
    "accum_freq": 1,
    "batch_size": 8,
    "world_size": 1,
    "epochs": 2,
    "model": "ViT-tiny-16-linear",
    "siglip": False,
}


@pytest.fixture(params=["3", "4"], ids=["version3", "version4"])
def log_writer(request: pytest.FixtureRequest) -> LogWriter:
    return LogWriter(request.param)


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    """The tools above, for tests that write their own logs."""
    return SimpleNamespace(LogWriter=LogWriter, PARAMS=PARAMS, model_text=model_text)


WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run folder: log text, params, results rows, zero-shot rows, run.json."""

    def write(
        name: str,
        log: str = "",
        params: dict[str, Any] | None = None,
        results: Sequence[dict[str, Any]] = (),
        zeroshot: Sequence[dict[str, Any]] = (),
        manifest: dict[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / "logs" / name
        (folder / "checkpoints").mkdir(parents=True)
        if log:
            (folder / "out.log").write_text(log, encoding="utf-8")
        text = "".join(f"{key}: {value}\n" for key, value in (params or PARAMS).items())
        (folder / "params.txt").write_text(text, encoding="utf-8")
        for file, rows in (("results.jsonl", results), ("zeroshot.jsonl", zeroshot)):
            if rows:
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / "checkpoints" / file).write_text(lines, encoding="utf-8")
        if manifest is not None:
            (folder / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
        return folder

    return write


def reference_folder(part: str) -> Path:
    """A folder of reference material; skips the test where OPENCLIP_LINATTN_SHARED does not lead to it."""
    root = os.environ.get("OPENCLIP_LINATTN_SHARED")
    folder = Path(root) / part if root else None
    if folder is None or not folder.is_dir():
        pytest.skip("set OPENCLIP_LINATTN_SHARED to the folder of reference material")
    return folder


@pytest.fixture(scope="session")
def scaling_data() -> Path:
    return reference_folder("scaling_data")


@pytest.fixture(scope="session")
def expected(scaling_data: Path) -> dict[str, Any]:
    return dict(json.loads((scaling_data / "expected.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def real_logs() -> Path:
    return reference_folder("logs")


@pytest.fixture
def write_ladder(write_run: WriteRun) -> Callable[..., Path]:
    """Writes runs of several widths and attention kinds whose losses follow a power law with noise."""

    def write(
        kinds: Sequence[str] = ("softmax", "linear"),
        widths: Sequence[int] = (64, 96, 128),
        epochs: int = 4,
        seed: int = 0,
    ) -> Path:
        generator = np.random.default_rng(seed)
        params = {**PARAMS, "batch_size": 64, "epochs": epochs}
        for kind, width in itertools.product(kinds, widths):
            writer, results, zeroshot = LogWriter(), [], []
            writer.process(params, model=model_text(kind, width))
            steps, level = 20, 1 + 0.05 * generator.normal()
            for epoch in range(epochs):
                done = epoch * steps
                noise = np.exp(0.05 * generator.normal(size=steps))
                losses = [_loss(kind, width, done + i + 1, level) * noise[i] for i in range(steps)]
                writer.epoch(epoch, 64, 64 * steps, losses)
                value = _loss(kind, width, done + steps, level) * np.exp(0.01 * generator.normal())
                results.append({"clip_val_loss": value, "epoch": epoch + 1, "num_samples": 512})
                row = {"dataset": "shapes", "label_set": "color x shape", "n": 512, "classes": 64}
                zeroshot.append({"checkpoint": f"epoch_{epoch + 1}.pt", **row, "top1": 1 - value / 5})
            folder = write_run(f"{kind}-{width}", writer.text, params, results, zeroshot)
        return folder.parent

    return write


def _loss(kind: str, width: int, steps: int, level: float) -> float:
    compute = width**2 * steps
    return float(level * (9.0 if kind == "softmax" else 10.5) * compute**-0.11)
