"""A text tower of transformers, built from a local config without a download, beside a linear image tower."""

import json
import os
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.hf_model import HFTextEncoder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, PreTrainedTokenizerFast, RobertaConfig
from typer.testing import CliRunner

from openclip_linattn import add_model_configs, registration
from openclip_linattn.attention import OperatorAttention
from openclip_linattn.cli import app
from openclip_linattn.cli.models import model_rows
from openclip_linattn.configs import read_config
from openclip_linattn.errors import UserError

NAME = "bert-test-ViT-normlinear"
WORDS = ("<s>", "<pad>", "</s>", "<unk>", "a", "red", "blue", "circle", "square", "dummy", "caption")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text model's config and tokenizer, and one with an OpenCLIP config that names it."""
    text, configs = tmp_path / "text", tmp_path / "configs"
    RobertaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    ).save_pretrained(text)  # fmt: skip
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(text)
    config = open_clip.get_model_config("ViT-T32-8-normlinear")
    config["text_cfg"] = {
        "hf_model_name": str(text), "hf_tokenizer_name": str(text), "hf_proj_type": "mlp", "context_length": 12,
    }  # fmt: skip
    configs.mkdir()
    (configs / f"{NAME}.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def registered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registration, "_models", dict(registration._models))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    assert add_model_configs(folder / "configs") == [NAME]
    return NAME


def test_a_step_lowers_the_loss(registered):
    torch.manual_seed(0)
    model = open_clip.create_model(registered, pretrained_text=False, output_dict=True).train()
    tokenizer = open_clip.get_tokenizer(registered)
    assert isinstance(model.text, HFTextEncoder)
    kinds = {module.kind for module in model.modules() if isinstance(module, OperatorAttention)}
    assert kinds == {"normlinear"}
    images, texts = torch.randn(2, 3, 48, 48), tokenizer(["a red circle", "a blue square"])
    assert texts.shape == (2, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = open_clip.ClipLoss()(**model(images, texts))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[1] < losses[0]
    for name, parameter in model.named_parameters():
        if "pooler" not in name:
            assert parameter.grad is not None, name


def test_its_checkpoints_say_the_image_tower_s_attention(registered):
    weights = open_clip.create_model(registered, pretrained_text=False).state_dict()
    assert bytes(weights["visual.transformer.attention_kind"].tolist()) == b"normlinear"
    weights["visual.transformer.attention_kind"] = torch.tensor(list(b"linear"), dtype=torch.uint8)
    with pytest.raises(UserError, match="trained with linear"):
        open_clip.create_model(registered, pretrained_text=False).load_state_dict(weights)


def test_its_config_is_checked_and_listed(registered, folder):
    row = next(row for row in model_rows() if row["model"] == NAME)
    assert (row["image_attention"], row["text_attention"], row["gmac"]) == (
        "normlinear",
        "transformers",
        None,
    )
    assert f"{NAME}" in CliRunner().invoke(app, ["models", NAME]).output
    path = folder / "configs" / f"{NAME}.json"
    good = json.loads(path.read_text())
    without = {key: value for key, value in good["text_cfg"].items() if key != "hf_tokenizer_name"}
    tower = {"timm_model_name": "linattn_w32_d3_h2_p8_n37_normlinear_text12"}
    for change, words in (
        ({"text_cfg": {**good["text_cfg"], "width": 16}}, "unknown key text_cfg.width"),
        ({"text_cfg": without}, "key text_cfg.hf_tokenizer_name is missing"),
        ({"vision_cfg": {**good["vision_cfg"], **tower}}, "keeps its own attention: leave _text12 out"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match=words):
            read_config(path)


@pytest.mark.slow
def test_it_trains_through_the_entrypoint(folder):
    """OpenCLIP's training asks for the text model's weights too, so they lie beside its config, drawn here."""
    AutoModel.from_config(RobertaConfig.from_pretrained(folder / "text")).save_pretrained(folder / "text")
    flags = (
        *("--model", NAME, "--dataset-type", "synthetic", "--train-num-samples", "16", "--batch-size", "8"),
        *("--epochs", "1", "--workers", "0", "--precision", "fp32", "--warmup", "1", "--name", "bert"),
        *("--logs", str(folder / "logs")),
    )
    done = subprocess.run(
        [sys.executable, "-m", "openclip_linattn.train", *flags],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "OPENCLIP_LINATTN_MODEL_CONFIGS": str(folder / "configs"),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((folder / "logs/bert/run.json").read_text())
    assert (run["status"], run["seen"]["steps"]) == ("finished", 2)
    assert (folder / "logs/bert/checkpoints/epoch_1.pt").exists()
