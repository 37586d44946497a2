"""What the first process of a torchrun tells the others."""

import subprocess
import sys

import pytest

from openclip_linattn.first_process import of_first_process

PROGRAM = """
import os, sys
from openclip_linattn.first_process import of_first_process
rank = os.environ["RANK"]
print(of_first_process(f"name-of-{rank}"), file=open(sys.argv[1] + rank, "w"))
"""


def test_all_processes_of_a_torchrun_have_the_first_one_s_value(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"),
        tmp_path / "program.py",
    ]
    subprocess.run([sys.executable, *command, f"{tmp_path}/rank"], check=True, timeout=120)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == ["name-of-0\n"] * 3


@pytest.mark.parametrize("world", [None, "1"])
def test_a_process_alone_has_its_own(monkeypatch, world):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if world:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("WORLD_SIZE", world)
    assert of_first_process("mine") == "mine"
