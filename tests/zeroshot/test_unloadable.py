"""What is said of a file that does not load as a model's weights."""

import argparse
import io
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openclip_linattn.zeroshot.checkpoints import Checkpoint, CheckpointError
from openclip_linattn.zeroshot.encoders.models import load_model

MODEL = "ViT-T32-8-softmax"
WEIGHT = {"visual.proj": torch.zeros(2, 3)}


def refusal(path: Path) -> str:
    """What loading the file as a model ends with, after the file's name."""
    with pytest.raises(CheckpointError) as caught:
        load_model(Checkpoint(path, MODEL), device=torch.device("cpu"), precision="fp32")
    message = str(caught.value)
    start = f"{path} does not load as {MODEL}: "
    assert message.startswith(start)
    return message[len(start) :]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "it holds a list and no state dict"),
        ({}, "it holds no weights"),
        ({"state_dict": {}}, "it holds no weights"),
        ({"epoch": 3, "model": WEIGHT}, "its weights are under 'model', and OpenCLIP"),
        ({"state_dict": {f"_orig_mod.{name}": each for name, each in WEIGHT.items()}}, "torch.compile adds"),
        ({f"module._orig_mod.{name}": each for name, each in WEIGHT.items()}, "torch.compile adds"),
        ({"state_dict": WEIGHT, "args": argparse.Namespace(a=1)}, "it holds Python objects besides tensors"),
        ({"state_dict": {"positional_embedding": torch.zeros(77, 3)}}, "a model of another size"),
        ({"state_dict": WEIGHT}, "Missing key"),
    ],
)
def test_what_is_wrong_with_the_content_is_said(tmp_path, content, words):
    torch.save(content, tmp_path / "epoch_1.pt")
    assert words in refusal(tmp_path / "epoch_1.pt")


def test_files_that_are_no_checkpoints_are_called_so(tmp_path):
    torch.save(WEIGHT, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    save_file(WEIGHT, tmp_path / "weights.safetensors")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("note.txt", "hello")
    old = io.BytesIO()
    torch.save({"args": argparse.Namespace(a=1)}, old, _use_new_zipfile_serialization=False)
    files = {
        "archive.pt": ((tmp_path / "archive.zip").read_bytes(), "it is no file of torch.save"),
        "old.pt": (old.getvalue(), "it holds Python objects besides tensors"),
        "cut.pt": (whole[: len(whole) // 2], "it is cut off or damaged"),
        "text.pt": (b"hello\n", "it is no file of torch.save"),
        "empty.pt": (b"", "it is no file of torch.save"),
        "other.pt": ((tmp_path / "weights.safetensors").read_bytes(), "must be named .safetensors"),
        "cut.safetensors": ((tmp_path / "weights.safetensors").read_bytes()[:40], "header"),
    }
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content)
        assert words in refusal(tmp_path / name)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript archive")  # PyTorch's own
def test_a_torchscript_archive_is_called_so(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "scripted.pt")
    assert "it is a TorchScript archive" in refusal(tmp_path / "scripted.pt")
