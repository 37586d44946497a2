"""The measurement of distillation: what it compares, and the table of what was measured."""

from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_choices_and_features_are_compared_with_the_teacher_s(script):
    truth = torch.tensor([0, 1, 2, 3])
    teacher = script.Answers(torch.eye(4), torch.tensor([0, 1, 2, 0]), truth)
    student = script.Answers(torch.eye(4)[[0, 1, 3, 3]], torch.tensor([0, 1, 1, 3]), truth)
    assert script.compared(student, teacher) == {"top1": 0.75, "agreement": 0.5, "cosine": 0.75}
    assert script.compared(teacher, teacher) == {"top1": 0.75, "agreement": 1.0, "cosine": 1.0}


def test_the_kept_results_have_a_table(script):
    lines = script.table(ROOT / "scripts/results/distill/distillation.json").splitlines()
    assert lines[0].startswith(
        "| attention | model | samples | color x shape top-1 | color x shape same choice |"
    )
    assert len({line.count("|") for line in lines}) == 1
    assert "| softmax | the teacher | - | 0.350 | 1.000 | 1.000 |" in lines[2]
    assert any(line.startswith("| normlinear | converted, then distilled | 16,384 |") for line in lines)
