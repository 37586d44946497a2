"""Reads OpenCLIP's out.log line by line, in the formats of its versions 2, 3 and 4.

The parser is tolerant: `nan (nan)`, `inf`, padded brackets, `[8 / 0]`, lines that a crash cut short. What it
leaves out it says in `Log.notices`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from openclip_scaling.errors import UserError

_NUMBER = r"[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?)"
_STAMP = r"\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d"
# A crash can cut a line, and the resumed run then writes its first line behind it.
_GLUED = re.compile(rf"(?<=.)(?={_STAMP} \|\s+(?:[\w.-]+ \| )?[A-Z]+ \| )")
# A host name may stand before the level, and versions 4 write the logger behind it.
_HEAD = re.compile(
    rf"^(?P<time>{_STAMP}) \|\s+(?:[\w.-]+ \| )?[A-Z]+ \| (?:[A-Za-z_][\w.]* \| )?(?P<text>.*)$"
)
_TRAIN = re.compile(
    r"^Train Epoch: (?P<epoch>\d+) \[\s*(?P<seen>\d+)\s*/\s*(?P<total>\d+)\s*\(\s*[\w.]+%\)\](?P<rest>.*)$"
)
_LOSS = re.compile(
    rf"(?P<name>\w*[lL]oss): (?P<value>{_NUMBER}) \((?P<mean>{_NUMBER})\)(?=\s|$)", re.IGNORECASE
)
_FIELD = {
    "learning_rate": re.compile(rf"\bLR: (?P<value>{_NUMBER})", re.IGNORECASE),
    "logit_scale": re.compile(rf"\bLogit Scale: (?P<value>{_NUMBER})", re.IGNORECASE),
    "samples_per_second": re.compile(rf"(?P<value>{_NUMBER})/s\b(?!/gpu)", re.IGNORECASE),
}
_EVAL = re.compile(r"^Eval Epoch: (?P<epoch>\d+) (?P<rest>.*)$")
_EVAL_PROGRESS = re.compile(r"^\[\s*\d+\s*/\s*\d+\s*\]")
_METRIC = re.compile(rf"(?P<name>[^\s:][^:\t]*): (?P<value>{_NUMBER})(?=\t|$)", re.IGNORECASE)
_END = re.compile(r"^End epoch (?P<epoch>\d+) \| (?P<rest>.*)$")
_AVERAGE = re.compile(rf"Avg (?P<name>\w+): (?P<value>{_NUMBER})(?=\s|$)", re.IGNORECASE)
_PARAM = re.compile(r"^  (?P<key>\w+): (?P<value>.*)$")
_PREPROCESSING = re.compile(r"image preprocessing configuration set: .*?'size': (?P<size>\(\d+, \d+\)|\d+)")
_NEW_PROCESS = re.compile(
    r"^(Running with a single process|Running in distributed mode|Running in horovod mode)"
)
LR_RESOLUTION = 5e-7  # six decimals are printed: 0.000000 says only that the rate is below this


@dataclass(frozen=True)
class TrainRecord:
    """One logged training step.

    epoch counts from 0; seen and epoch_samples are global samples within the epoch; loss is this step's.
    learning_rate is None where the log prints 0.000000 (below 5e-7).
    """

    time: datetime
    epoch: int
    seen: int
    epoch_samples: int
    loss: float
    losses: dict[str, float]
    learning_rate: float | None
    logit_scale: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation: epoch counts finished epochs (from 1); metrics by OpenCLIP's own names."""

    time: datetime
    epoch: int
    metrics: dict[str, float]


@dataclass
class Segment:
    """What one process wrote: a run that was resumed has several."""

    params: dict[str, str] = field(default_factory=dict)
    train: list[TrainRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    epoch_means: dict[int, float] = field(default_factory=dict)  # 4.x prints them, by epoch from 0
    model_repr: str = ""
    image_size: tuple[int, int] | None = None
    first_time: datetime | None = None
    last_time: datetime | None = None

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from the first to the last line."""
        if self.first_time is None or self.last_time is None:
            return 0.0
        return (self.last_time - self.first_time).total_seconds()


@dataclass
class Log:
    """The segments of an out.log in file order, and a sentence for each thing that was left out."""

    segments: list[Segment]
    notices: list[str]


def read_log(path: Path) -> Log:
    """Read one out.log. Raises UserError when the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    return parse_log(text)


def parse_log(text: str) -> Log:
    """Parse the text of an out.log."""
    reader = _Reader()
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        *cut, whole = _GLUED.split(line)
        for piece in cut:
            reader.line(number, piece, unfinished=True)
        reader.line(number, whole, unfinished=number == len(lines) and not text.endswith("\n"))
    reader.close()
    return Log(segments=reader.segments, notices=reader.notices)


class _Reader:
    """Holds the state that crosses lines: the current segment, and the model printout that spans many."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.notices: list[str] = []
        self._block: list[str] | None = None

    @property
    def segment(self) -> Segment:
        if not self.segments:
            self.segments.append(Segment())
        return self.segments[-1]

    def line(self, number: int, line: str, *, unfinished: bool) -> None:
        head = _HEAD.match(line)
        if head is None:
            if self._block is not None:
                self._block.append(line)
            return
        self.close()
        time = _time(head["time"])
        if time is None:
            self.notices.append(
                f"line {number}: the time {head['time']} does not exist; the line is left out"
            )
            return
        text = head["text"]
        self._begin_segment(text)
        self.segment.first_time = self.segment.first_time or time
        self.segment.last_time = time
        if not self._record(time, text, unfinished=unfinished):
            self.notices.append(f"line {number} is cut or malformed and is left out: {text[:60].strip()!r}")

    def close(self) -> None:
        if self._block is not None:
            self.segment.model_repr = "\n".join(self._block)
            self._block = None

    def _begin_segment(self, text: str) -> None:
        # "Found latest resume checkpoint" comes just before "Running with", from the same process.
        current = self.segment
        started = current.params or current.train or current.evals or current.model_repr
        if started and (_NEW_PROCESS.match(text) or text.startswith("Found latest resume checkpoint")):
            self.segments.append(Segment())

    def _record(self, time: datetime, text: str, *, unfinished: bool) -> bool:
        """Store what the line says; False when it is a record that cannot be read whole."""
        if text.startswith("Train Epoch:"):
            train = _train_record(time, text)
            if train is not None:
                self.segment.train.append(train)
            return train is not None
        if text.startswith("Eval Epoch:"):
            return self._evaluation(time, text, unfinished=unfinished)
        if text.startswith("End epoch"):
            return self._epoch_mean(text)
        self._description(text)
        return True

    def _evaluation(self, time: datetime, text: str, *, unfinished: bool) -> bool:
        match = _EVAL.match(text)
        if match is None:
            return False
        if _EVAL_PROGRESS.match(match["rest"].strip()):
            return True
        pairs = [p for p in match["rest"].split("\t") if p.strip()]
        found = [_METRIC.fullmatch(p.strip()) for p in pairs]
        # Metrics have four decimals, so a last number with fewer was cut.
        cut = unfinished and not re.search(r"(\.\d{4}|nan|inf)\s*$", text)
        if not pairs or None in found or cut:
            return False
        metrics = {m["name"]: float(m["value"]) for m in found if m is not None and m["name"] != "epoch"}
        self.segment.evals.append(EvalRecord(time, int(match["epoch"]), metrics))
        return True

    def _epoch_mean(self, text: str) -> bool:
        match = _END.match(text)
        means = (
            {m["name"].lower(): float(m["value"]) for m in _AVERAGE.finditer(match["rest"])} if match else {}
        )
        if match is None or not means:
            return False
        self.segment.epoch_means[int(match["epoch"])] = means.get("loss", next(iter(means.values())))
        return True

    def _description(self, text: str) -> None:
        if param := _PARAM.match(text):
            self.segment.params[param["key"]] = param["value"]
        elif text == "Model:":
            self._block = []
        elif re.match(r"^\w+\($", text) and not self.segment.model_repr:
            self._block = [text]
        elif size := _PREPROCESSING.search(text):
            numbers = [int(n) for n in re.findall(r"\d+", size["size"])]
            self.segment.image_size = (numbers[0], numbers[-1])


def _train_record(time: datetime, text: str) -> TrainRecord | None:
    match = _TRAIN.match(text)
    if match is None:
        return None
    losses = {m["name"].lower(): float(m["value"]) for m in _LOSS.finditer(match["rest"])}
    # The total comes last in versions 3 and 4; its absence means that the line was cut.
    if "loss" not in losses:
        return None
    values = {name: _search(pattern, match["rest"]) for name, pattern in _FIELD.items()}
    rate = values["learning_rate"]
    return TrainRecord(
        time=time,
        epoch=int(match["epoch"]),
        seen=int(match["seen"]),
        epoch_samples=int(match["total"]),
        loss=losses["loss"],
        losses=losses,
        learning_rate=rate if rate is not None and rate >= LR_RESOLUTION else None,
        logit_scale=values["logit_scale"],
        samples_per_second=values["samples_per_second"],
    )


def _search(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    value = float(match["value"]) if match else math.nan
    return value if math.isfinite(value) else None


def _time(stamp: str) -> datetime | None:
    try:
        return datetime.strptime(stamp, "%Y-%m-%d,%H:%M:%S")
    except ValueError:
        return None


def read_params(path: Path) -> dict[str, str]:
    """Read params.txt ("key: value" lines) as strings; an absent file is an empty dict."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
