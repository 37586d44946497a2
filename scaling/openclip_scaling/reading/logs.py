"""Reads OpenCLIP's out.log line by line, in the formats of its versions 2, 3 and 4.

The parser is tolerant: `nan (nan)`, `inf`, padded brackets, `[8 / 0]`, lines that a crash cut short, clocks that
are set back. What it leaves out or repairs it says in `Log.notices`. Of the text it holds a line at a time, and
the printed model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from openclip_scaling.errors import UserError
from openclip_scaling.reading.records import TrainRecords

_NUMBER = r"[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?)"
_STAMP = r"\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d"
# A host name may stand before the level, and versions 4 write the logger behind it.
_LEVEL = r" \|\s+(?:[\w.-]+ \| )?[A-Z]+ \| "
# A crash can cut a line, and the resumed run then writes its first line behind it.
_GLUED = re.compile(rf"(?<=.)(?={_STAMP}{_LEVEL})")
_HEAD = re.compile(rf"^(?P<time>{_STAMP}){_LEVEL}(?:[A-Za-z_][\w.]* \| )?(?P<text>.*)$")
# No more digits than let the samples of all epochs together fit into 64 bits.
_TRAIN = re.compile(r"^Train Epoch: (\d{1,6}) \[\s*(\d{1,12})\s*/\s*(\d{1,12})\s*\(\s*[\w.]+%\)\]")
_LOSS = re.compile(rf"({_NUMBER}) \({_NUMBER}\)(?=\s|$)")
_RATE = re.compile(_NUMBER)
_EVAL = re.compile(r"^Eval Epoch: (?P<epoch>\d{1,9}) (?P<rest>.*)$")
_EVAL_PROGRESS = re.compile(r"^\[\s*\d+\s*/\s*\d+\s*\]")
_METRIC = re.compile(rf"(?P<name>[^\s:][^:\t]*): (?P<value>{_NUMBER})(?=\t|$)", re.IGNORECASE)
_PARAM = re.compile(r"^  (?P<key>\w+): (?P<value>.*)$")
_PREPROCESSING = re.compile(r"image preprocessing configuration set: .*?'size': (?P<size>\(\d+, \d+\)|\d+)")
_NEW_PROCESS = re.compile(
    r"^Running (?:with a (?P<single>single) process|in distributed mode|in horovod mode)"
    r"(?:.*?Device:? (?P<device>[a-z]+))?(?:.*total (?P<processes>\d+))?"
)
LR_RESOLUTION = 5e-7  # six decimals are printed: 0.000000 says only that the rate is below this


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation: epoch counts finished epochs (from 1); metrics by OpenCLIP's own names."""

    epoch: int
    metrics: dict[str, float]


@dataclass
class Segment:
    """What one process wrote: a run that was resumed has several.

    seconds is the wall-clock time from its first to its last line; device and processes are those that it says it
    runs on, where it does. finished counts the epochs that are known to be whole though their last steps may not
    have been kept. batch is the global one, where it is known from elsewhere than the params.
    """

    params: dict[str, str] = field(default_factory=dict)
    train: TrainRecords = field(default_factory=TrainRecords)
    evals: list[EvalRecord] = field(default_factory=list)
    model_repr: str = ""
    image_size: tuple[int, int] | None = None
    seconds: float = 0.0
    device: str | None = None
    processes: int | None = None
    finished: int = 0
    batch: int | None = None


@dataclass
class Log:
    """The segments of an out.log in file order, and a sentence for each thing that was left out or repaired."""

    segments: list[Segment]
    notices: list[str]


def read_log(path: Path) -> Log:
    """Read one out.log. Raises UserError when the file cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return parse_log(lines)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


def parse_log(lines: Iterable[str]) -> Log:
    """Parse the lines of an out.log, one after the other."""
    reader = _Reader()
    for number, line in enumerate(lines, start=1):
        reader.line(number, line)
    reader.close()
    return Log(segments=reader.segments, notices=reader.notices)


class _Reader:
    """Holds the state that crosses lines: the segment, its clock, and the model printout that spans many."""

    def __init__(self) -> None:
        self.segments: list[Segment] = [Segment()]
        self.notices: list[str] = []
        self._block: list[str] | None = None
        self._stamp = ""
        self._time: datetime | None = None

    def line(self, number: int, line: str) -> None:
        unfinished = not line.endswith("\n")  # only the last line can be
        whole = line if unfinished else line[:-1]
        # The stamp of a line has its last hyphen in column 7: without another one nothing is glued to it.
        if whole.find("-", 8) >= 0:
            *cut, whole = _GLUED.split(whole)
            for piece in cut:
                self._piece(number, piece, unfinished=True)
        self._piece(number, whole, unfinished=unfinished)

    def close(self) -> None:
        if self._block is not None:
            self.segments[-1].model_repr = "\n".join(self._block)
            self._block = None

    def _piece(self, number: int, line: str, *, unfinished: bool) -> None:
        head = _HEAD.match(line)
        if head is None:
            self._headless(number, line)
            return
        stamp, text = head.groups()
        if self._block is not None:
            self.close()
        if not text.startswith("Train Epoch:"):
            self._begin_process(text)
        if not self._tick(number, stamp):
            return
        if not self._record(number, text, unfinished=unfinished):
            self.notices.append(f"line {number} is cut or malformed and is left out: {text[:60].strip()!r}")

    def _headless(self, number: int, line: str) -> None:
        if "\0" in line:
            self.notices.append(f"line {number} holds NUL bytes, as a crash or a full disk leaves them")
        elif self._block is not None:
            self._block.append(line)
        elif "Loss: " in line or "Train Epoch: " in line:
            self.notices.append(
                f"line {number} has lost its beginning and is left out: {line[:60].strip()!r}"
            )

    def _tick(self, number: int, stamp: str) -> bool:
        """Move the segment's clock on to a time stamp; False where that time does not exist."""
        if stamp == self._stamp and self._time is not None:
            return True
        try:
            time = datetime.fromisoformat(stamp)
        except ValueError:
            self.notices.append(f"line {number}: the time {stamp} does not exist; the line is left out")
            return False
        if self._time is not None:
            passed = (time - self._time).total_seconds()
            if passed < 0:
                self.notices.append(
                    f"line {number}: the clock goes back by {-passed:.0f} s, which count as no time"
                )
            self.segments[-1].seconds += max(0.0, passed)
        self._stamp, self._time = stamp, time
        return True

    def _begin_process(self, text: str) -> None:
        # "Found latest resume checkpoint" comes just before "Running with", from the same process.
        process = _NEW_PROCESS.match(text)
        if process is None and not text.startswith("Found latest resume checkpoint"):
            return
        current = self.segments[-1]
        if current.params or len(current.train) or current.evals or current.model_repr:
            self._begin_segment(Segment())
        if process is not None:
            self.segments[-1].device = process["device"]
            self.segments[-1].processes = 1 if process["single"] else int(process["processes"] or 0) or None

    def _begin_segment(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._time = None

    def _record(self, number: int, text: str, *, unfinished: bool) -> bool:
        """Store what the line says; False when it is a record that cannot be read whole."""
        if text.startswith("Train Epoch:"):
            return self._training(number, text)
        if text.startswith("Eval Epoch:"):
            return self._evaluation(text, unfinished=unfinished)
        self._description(text)
        return True

    def _training(self, number: int, text: str) -> bool:
        match = _TRAIN.match(text)
        # The total comes last in versions 3 and 4; its absence means that the line was cut.
        total = text.rfind(" Loss: ")
        loss = _LOSS.match(text, total + 7) if total > 0 else None
        if match is None or loss is None:
            return False
        epoch, seen, epoch_samples = map(int, match.groups())
        segment = self.segments[-1]
        if segment.train.goes_back(epoch, seen):
            self.notices.append(
                f"line {number}: training goes back to sample {seen} of epoch {epoch} where no process is said to "
                "start; what follows is taken for a resumed process"
            )
            segment.seconds = segment.train[len(segment.train) - 1].seconds
            segment = replace(
                segment, params=dict(segment.params), train=TrainRecords(), evals=[], seconds=0.0
            )
            self._begin_segment(segment)
            self._tick(number, self._stamp)
        position = text.find(" LR: ", match.end())
        found = _RATE.match(text, position + 5) if position > 0 else None
        rate = float(found[0]) if found else math.nan
        known_rate = rate if rate >= LR_RESOLUTION else math.nan
        segment.train.append(epoch, seen, epoch_samples, float(loss[1]), known_rate, segment.seconds)
        return True

    def _evaluation(self, text: str, *, unfinished: bool) -> bool:
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
        self.segments[-1].evals.append(EvalRecord(int(match["epoch"]), metrics))
        return True

    def _description(self, text: str) -> None:
        segment = self.segments[-1]
        if param := _PARAM.match(text):
            segment.params[param["key"]] = param["value"]
        elif text == "Model:":
            self._block = []
        elif re.match(r"^\w+\($", text) and not segment.model_repr:
            self._block = [text]
        elif size := _PREPROCESSING.search(text):
            numbers = [int(n) for n in re.findall(r"\d+", size["size"])]
            segment.image_size = (numbers[0], numbers[-1])


def read_params(path: Path) -> dict[str, str]:
    """Read params.txt ("key: value" lines) as strings; an absent file is an empty dict."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
