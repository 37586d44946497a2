"""The screen of `openclip-linattn eval`."""

from openclip_linattn.cli.evaluate.command import evaluate_command

__all__ = ["evaluate_command"]
