"""A command line in this process, and workloads without tensors."""

import sys
from types import SimpleNamespace

import pytest
import torch

from openclip_linattn.bench.sweep import Stage, Workload
from openclip_linattn.cli import main


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls `openclip-linattn ARGS`; gives exit status, standard output and standard error."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["openclip-linattn", *map(str, args)])
        threads = torch.get_num_threads()
        with pytest.raises(SystemExit) as ended:
            main()
        assert torch.get_num_threads() == threads
        captured = capsys.readouterr()
        return SimpleNamespace(status=ended.value.code, out=captured.out, err=captured.err)

    return call


class FakeStage(Stage):
    def __init__(self, workload, size):
        self.workload, self.size = workload, size

    def missing_bytes(self, name):
        return self.workload.standing(self.size)

    def run(self, name, direction):
        def once():
            self.workload.ran.append((name, self.size, direction))
            return self.workload.functions[name](self.size)

        return once

    def inspect(self, name, direction, result):
        self.workload.inspected.append((name, self.size, result))


class FakeWorkload(Workload):
    """Candidates are functions of the size."""

    device = torch.device("cpu")

    def __init__(self, functions, quadratics=(), standing=lambda size: 0):
        self.functions, self.quadratics, self.standing = functions, quadratics, standing
        self.names = list(functions)
        self.ran, self.inspected, self.failures = [], [], []

    def tokens(self, size):
        return size

    def quadratic(self, name):
        return name in self.quadratics

    def stage(self, size):
        return FakeStage(self, size)

    def note_failure(self, name, size, error):
        self.failures.append((name, size, str(error)))


@pytest.fixture
def fake_workload():
    return FakeWorkload
