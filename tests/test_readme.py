"""The README is true: its code blocks run in order, its tables are what the code counts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest

from openclip_linattn.registration import models
from openclip_scaling.flops import attention_macs, clip_cost

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SET_UP = {"bash scripts/quickstart.sh\n": "--tiny --out {out}", "bash scripts/test.sh\n": "--tiny"}


def environment() -> dict[str, str]:
    """The tests' own interpreter on PATH, and nothing installed anew."""
    folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": folder + os.pathsep + os.environ["PATH"],
        "OPENCLIP_LINATTN_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }


def call(command: list[str], folder: Path) -> str:
    result = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_every_block_has_a_language_that_is_known():
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text"}
    assert README.count("```") == 2 * len(BLOCKS)
    assert SET_UP.keys() <= {code for _, code in BLOCKS}


@pytest.mark.slow
@pytest.mark.parametrize("command", SET_UP)
def test_the_two_commands_in_their_tiny_form(command, tmp_path):
    call(["bash", "-c", command.strip() + " " + SET_UP[command].format(out=tmp_path / "out")], ROOT)


@pytest.mark.slow
def test_shell_blocks_run_in_order(tmp_path):
    for language, code in BLOCKS:
        if language == "bash" and code not in SET_UP:
            call(["bash", "-euo", "pipefail", "-c", code], tmp_path)
    assert (tmp_path / "report" / "report.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [code for language, code in BLOCKS if language == "python"], ids=["models", "ops"]
)
def test_python_blocks_run(code, tmp_path):
    assert "torch.Size" in call([sys.executable, "-c", code], tmp_path)


def rows(first: str) -> list[list[str]]:
    """The cells of the README's table whose header begins with a cell."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    table = []
    while lines[start].startswith("|"):
        table.append([cell.strip(" `") for cell in lines[start].strip("|").split("|")])
        start += 1
    return table


def test_table_of_models():
    for size, pixels, tokens, *numbers in rows("size"):
        config = open_clip.get_model_config(f"{size}-softmax")
        costs = [clip_cost(config, kind) for kind in ("softmax", "normlinear", "lininfsa", "neumannlinear")]
        cost = costs[0]
        assert pixels == str(config["vision_cfg"]["image_size"])
        assert tokens == str(models()[f"{size}-softmax"].tower.train_tokens)
        assert numbers[:3] == [
            f"{n / 1e6:.2f}" for n in (cost.image_parameters, cost.text_parameters, cost.parameters)
        ]
        places = 2 if "-16" in size else 4
        assert numbers[3:] == [f"{each.image_gmac:.{places}f}" for each in costs], size


def test_table_of_resolutions():
    for pixels, tokens, softmax, linear, share, ratio in rows("px"):
        suffix = "" if pixels == "224" else f"-{pixels}"
        costs = [
            clip_cost(open_clip.get_model_config(f"ViT-B-16-{kind}{suffix}"))
            for kind in ("softmax", "normlinear")
        ]
        assert int(tokens) == (int(pixels) // 16) ** 2 + 1
        assert [softmax, linear] == [f"{cost.image_gmac:.1f}" for cost in costs]
        products = 12 * attention_macs("softmax", int(tokens), 768, 12) / 1e9
        assert share == f"{100 * products / costs[0].image_gmac:.0f} %"
        assert ratio == f"{costs[0].image_gmac / costs[1].image_gmac:.2f}"


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_house_in_the_picture_is_there():
    (picture,) = [code for language, code in BLOCKS if language == "text" and "registration.py" in code]
    for name in re.findall(r"[\w/]+(?:\.py|/)(?=\s)", picture):
        patterns = (
            name,
            f"openclip_linattn/{name}",
            f"openclip_linattn/*/{name}",
            f"scaling/openclip_scaling/{name}",
        )
        assert any(list(ROOT.glob(pattern.rstrip("/"))) for pattern in patterns), name


def test_results_are_those_of_the_committed_report():
    report = (
        (ROOT / "scripts" / "results" / "quickstart" / "report.md").read_text(encoding="utf-8").splitlines()
    )
    results = README.split("<!-- results -->")[1].split("<!-- end of results -->")[0]
    numbers = [line for line in results.splitlines() if line.startswith("|") and not line.startswith("|---")]
    assert len(numbers) >= 7
    for line in numbers:
        assert line in report, line


def test_the_verdict_of_the_laptop_plan_is_that_of_the_committed_report():
    report = (ROOT / "scaling" / "results" / "laptop" / "report.md").read_text(encoding="utf-8")
    section = README.split("<!-- laptop -->")[1].split("<!-- end of laptop -->")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "[" in line]
    assert len(rows) == 2
    assert all(row in report.splitlines() for row in rows)
    verdicts = re.findall(r"^- .+ \(power law\): .+$", section, flags=re.MULTILINE)
    assert len(verdicts) == 2
    assert all(verdict in report.splitlines() for verdict in verdicts)
    needs = re.findall(
        r"(\w+)(?: needs)?\s([\d.]+)(?: times)?\s(\[[\d., ]+\])", section.split("that both reach,")[1]
    )
    assert [kind for kind, *_ in needs] == ["linear", "normlinear", "neumannlinear"]
    for kind, times, interval in needs:
        assert f"{kind} needs {times} times {interval} the training compute of softmax" in report


def test_the_sweep_of_learning_rates_says_what_the_readme_says():
    (words,) = re.findall(
        r"it is softmax's best, and the best of\sthe others is at most ([\d.]+) nats below theirs at 1e-3, which is "
        r"what two seeds differ by, and ([\d.]+) or more\sabove softmax",
        README,
    )
    near, above = map(float, words)
    report = (ROOT / "scaling/results/laptop-rates/report.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| (\w+) \| [^|]+ \| (.+) \|$",
        report.split("## validation loss")[1].split("\n## ")[0],
        re.MULTILINE,
    )
    losses = {
        kind: [float(each.strip("*")) for each in row.split(" | ")]
        for kind, row in table
        if kind != "attention"
    }
    assert losses.keys() == {"softmax", "linear", "normlinear", "neumannlinear"}
    best = {kind: min(row) for kind, row in losses.items()}
    assert best["softmax"] == losses["softmax"][1]  # of 5e-4, 1e-3, 2e-3, 4e-3
    assert max(losses[kind][1] - best[kind] for kind in best) <= near
    assert min(best[kind] for kind in best if kind != "softmax") - best["softmax"] >= above
