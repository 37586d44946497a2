"""The parser of out.log: both formats, and what crashes and divergence leave in them."""

from __future__ import annotations

import io
import math
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from openclip_scaling.errors import UserError
from openclip_scaling.reading.architecture import read_architecture
from openclip_scaling.reading.logs import Log, parse_log, read_log, read_params


def parsed(text: str) -> Log:
    return parse_log(io.StringIO(text, newline=None))


def test_train_and_eval_lines(log_writer: Any, fake: Any) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 24, [2.0794, 1.5, 0.97548])
    log_writer.line("Eval Epoch: 1 [8 / 40]\tClip Loss: 1.179190\t")
    log_writer.evaluation(1, **{"image_to_text_R@1": 0.1, "clip_val_loss": 1.0252})
    log = parsed(log_writer.text)
    (segment,) = log.segments
    assert log.notices == []
    assert [(r.epoch, r.seen, r.epoch_samples, r.loss) for r in segment.train] == [
        (0, 8, 24, 2.0794), (0, 16, 24, 1.5), (0, 24, 24, 0.97548),
    ]  # fmt: skip
    assert [(e.epoch, e.metrics) for e in segment.evals] == [
        (1, {"image_to_text_R@1": 0.1, "clip_val_loss": 1.0252, "num_samples": 40.0})
    ]
    assert segment.params["batch_size"] == "8"
    assert segment.image_size == (64, 64)
    assert segment.model_repr == fake.model_text()


def test_older_order_of_fields_is_read() -> None:
    text = (
        "2022-09-01,10:00:00 | INFO | Train Epoch: 3 [ 512/1024 (50%)] Loss: 4.1234 (4.500) Data (t): 0.1 "
        "Batch (t): 0.2, 2560.5/s LR: 0.000123 Logit Scale: 20.100\n"
    )
    (record,) = parsed(text).segments[0].train
    assert (record.epoch, record.seen, record.loss, record.learning_rate) == (3, 512, 4.1234, 0.000123)


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("nan (nan)", math.nan),
        ("inf (inf)", math.inf),
        ("-inf (nan)", -math.inf),
        ("12345. (1.2346e+05)", 12345.0),
        ("9.8e-05 (0.0001)", 9.8e-05),
    ],
)
def test_unusual_numbers(log_writer: Any, fake: Any, printed: str, value: float) -> None:
    log_writer.train(0, 8, 24, printed)
    (record,) = parsed(log_writer.text).segments[0].train
    assert record.loss == pytest.approx(value, nan_ok=True)


def test_learning_rate_of_zero_is_unknown_not_zero(log_writer: Any, fake: Any) -> None:
    log_writer.train(0, 8, 24, 2.0, rate=0.0)
    log_writer.train(0, 16, 24, 2.0, rate=1e-6)
    first, second = parsed(log_writer.text).segments[0].train
    assert first.learning_rate is None
    assert second.learning_rate == 1e-6


def test_brackets_with_any_padding_and_zero_totals(log_writer: Any, fake: Any) -> None:
    log_writer.train(0, 8, 100000, 2.0)
    log_writer.train(0, 8, 0, 2.0)
    log_writer.line("Eval Epoch: 1 [8 / 0]\tClip Loss: 1.179190\t")
    log = parsed(log_writer.text)
    assert [r.epoch_samples for r in log.segments[0].train] == [100000, 0]
    assert log.notices == []


def test_a_last_line_cut_anywhere_is_left_out_and_named(log_writer: Any) -> None:
    log_writer.train(0, 8, 24, 2.0)
    whole = log_writer.text
    log_writer.train(0, 16, 24, 1.75)
    last = log_writer.lines[-1]
    for length in range(len(last)):
        log = parsed(whole + last[:length])
        assert [r.loss for r in log.segments[0].train] == [2.0], length
        assert len(log.notices) == ("Train Epoch:" in last[:length]), length


def test_a_whole_last_line_without_newline_counts(log_writer: Any, fake: Any) -> None:
    log_writer.train(0, 8, 24, 2.0)
    log_writer.evaluation(1, clip_val_loss=1.0252)
    log = parsed(log_writer.text.rstrip("\n"))
    assert len(log.segments[0].train) == len(log.segments[0].evals) == 1


def test_a_cut_evaluation_is_not_taken_for_a_smaller_number(log_writer: Any, fake: Any) -> None:
    log_writer.evaluation(1, clip_val_loss=1.0252)
    text = log_writer.text
    for cut in ("1.02", "1.", "1.025"):
        log = parsed(text[: text.index("1.0252")] + cut)
        assert log.segments[0].evals == []
        assert len(log.notices) == 1


def test_a_line_cut_by_a_crash_and_continued_by_the_resumed_process(log_writer: Any, fake: Any) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.train(0, 8, 24, 2.0)
    cut = log_writer.lines.pop()[:100]
    log_writer.process(fake.PARAMS, resumed=True)
    index = next(i for i, line in enumerate(log_writer.lines) if "Found latest" in line)
    log_writer.lines[index] = cut + log_writer.lines[index]
    log_writer.train(0, 8, 24, 1.9)
    log = parsed(log_writer.text)
    assert [[r.loss for r in s.train] for s in log.segments] == [[], [1.9]]
    assert len(log.notices) == 1


@pytest.mark.parametrize("host", ["", " node-3.cluster | "])
def test_a_host_name_before_the_level(log_writer: Any, host: str) -> None:
    log_writer.train(0, 8, 24, 2.0)
    text = log_writer.text.replace(" | INFO", f" | {host}INFO")
    assert [r.loss for r in parsed(text).segments[0].train] == [2.0]


def test_every_process_is_a_segment(log_writer: Any, fake: Any) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 16, [2.0, 1.9])
    log_writer.process({**fake.PARAMS, "epochs": 3}, resumed=True)
    log_writer.epoch(1, 8, 16, [1.8, 1.7])
    log = parsed(log_writer.text)
    assert [s.params["epochs"] for s in log.segments] == ["2", "3"]
    assert [len(s.train) for s in log.segments] == [2, 2]


@pytest.mark.parametrize("text", ["", "\n\n", "no log at all\n", "\x00\xff binary"])
def test_foreign_text_gives_no_records(text: str) -> None:
    log = parsed(text)
    assert sum(len(s.train) + len(s.evals) for s in log.segments) == 0


def test_an_absent_log_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*out\.log"):
        read_log(tmp_path / "out.log")
    assert read_params(tmp_path / "params.txt") == {}


def test_a_step_before_the_last_one_begins_a_process_that_said_nothing(log_writer: Any, fake: Any) -> None:
    started = log_writer.time + timedelta(seconds=1)
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 24, [2.0, 1.9, 1.8])
    seconds = (log_writer.time - started).total_seconds()
    log_writer.time += timedelta(hours=5)
    log_writer.epoch(0, 8, 24, [1.7, 1.6])
    log = parsed(log_writer.text)
    assert [[r.loss for r in s.train] for s in log.segments] == [[2.0, 1.9, 1.8], [1.7, 1.6]]
    assert log.segments[1].params == log.segments[0].params
    assert [s.seconds for s in log.segments] == [pytest.approx(seconds), 1.0]
    assert "goes back to sample 8 of epoch 0" in log.notices[0]


def test_a_clock_that_is_set_back_takes_no_time_away(log_writer: Any, fake: Any) -> None:
    log_writer.train(0, 8, 24, 2.0)
    log_writer.time -= timedelta(hours=1)
    log_writer.train(0, 16, 24, 1.9)
    log_writer.train(0, 24, 24, 1.8)
    log = parsed(log_writer.text)
    assert [r.seconds for r in log.segments[0].train] == [0.0, 0.0, 1.0]
    assert log.notices == ["line 2: the clock goes back by 3599 s, which count as no time"]


@pytest.mark.parametrize(
    ("garbage", "named"),
    [("\0" * 40, "NUL bytes"), ("rain Epoch: 0 [ 8/24 (33%)] Loss: 2.0 (2.0)", "lost its beginning")],
)
def test_what_a_crash_leaves_between_lines_is_named(log_writer: Any, garbage: str, named: str) -> None:
    log_writer.train(0, 8, 24, 2.0)
    log_writer.lines.append(garbage)
    log_writer.train(0, 16, 24, 1.9)
    log = parsed(log_writer.text)
    assert [r.loss for r in log.segments[0].train] == [2.0, 1.9]
    assert len(log.notices) == 1
    assert "line 2" in log.notices[0]
    assert named in log.notices[0]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_every_line_ending_is_read(log_writer: Any, fake: Any, ending: str, tmp_path: Path) -> None:
    log_writer.process(fake.PARAMS)
    log_writer.epoch(0, 8, 24, [2.0, 1.9])
    path = tmp_path / "out.log"
    path.write_bytes(log_writer.text.replace("\n", ending).encode())
    (segment,) = read_log(path).segments
    assert [r.loss for r in segment.train] == [2.0, 1.9]
    assert segment.model_repr == fake.model_text()


def test_a_log_is_read_in_little_memory(log_writer: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    with path.open("w", encoding="utf-8") as stream:
        for epoch in range(5):
            log_writer.lines.clear()
            log_writer.epoch(epoch, 8, 16000, [2.0] * 2000)
            stream.write(log_writer.text)
    tracemalloc.start()
    log = read_log(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(s.train) for s in log.segments) == 10000
    assert peak < 0.35 * path.stat().st_size


def test_params_keep_values_with_colons(tmp_path: Path) -> None:
    (tmp_path / "params.txt").write_text("train_data: pipe:cat a.tar\nbatch_size: 8\n", encoding="utf-8")
    assert read_params(tmp_path / "params.txt") == {"train_data": "pipe:cat a.tar", "batch_size": "8"}


@pytest.mark.parametrize("kind", ["softmax", "linear", "infsa", "neumannlinear"])
def test_architecture_from_the_printed_model(kind: str, fake: Any) -> None:
    found = read_architecture(fake.model_text(kind, width=128, layers=3), (48, 64))
    vision, text = found.config["vision_cfg"], found.config["text_cfg"]
    assert (vision["width"], vision["layers"], vision["image_size"]) == (128, 3, [48, 64])
    assert (text["width"], text["layers"], text["vocab_size"], text["context_length"]) == (64, 1, 49408, 77)
    assert (found.image_attention, found.text_attention) == (kind, "softmax")
    assert "context length 77" in found.notices[0]


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        (lambda text: "", (64, 64), "no printed model"),
        (lambda text: text, None, "image size"),
        (lambda text: text.replace("kind=linear", "kind=madeup"), (64, 64), "'madeup' is unknown"),
        (
            lambda text: text.replace("VisionTransformer(", "TimmModel("),
            (64, 64),
            "not OpenCLIP's VisionTransformer",
        ),
        (lambda text: text.replace("(token_embedding)", "(other)"), (64, 64), "text tower"),
        (lambda text: text.replace("ResidualAttentionBlock", "Identity"), (64, 64), "no residual blocks"),
        (lambda text: text.replace("(visual)", "(image)"), (64, 64), "no image tower"),
        (lambda text: text.replace("heads=2", "heads=3"), (64, 64), "does not divide into 3 heads"),
    ],
    ids=["empty", "no-size", "kind", "timm", "text", "no-blocks", "no-visual", "heads"],
)
def test_what_the_printout_does_not_tell_is_refused(
    change: Callable[[str], str], size: tuple[int, int] | None, message: str, fake: Any
) -> None:
    with pytest.raises(UserError, match=message):
        read_architecture(change(fake.model_text()), size)


def test_real_logs_are_read_whole(real_logs: Path) -> None:
    paths = sorted(real_logs.glob("*/out.log"))
    assert len(paths) == 4
    for path in paths:
        text = path.read_text(encoding="utf-8")
        log = read_log(path)
        assert log.notices == []
        assert (
            sum(len(s.train) for s in log.segments) == text.count("Train Epoch:") == 32
            or "webdataset" in path.parent.name
        )
        assert sum(len(s.evals) for s in log.segments) == 2
        assert all(s.model_repr.startswith("CLIP(") and s.image_size == (64, 64) for s in log.segments)
