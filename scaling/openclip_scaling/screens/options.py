"""The options that the fitting commands share, as one table that becomes the parameters of each command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from openclip_scaling.errors import UserError
from openclip_scaling.fitting.settings import DEFAULT_DELTA, Settings
from openclip_scaling.forms.laws import BOTH, LAWS

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "metric": (
        Annotated[
            str,
            typer.Option("--metric", "--y", help="val_loss, train_loss or a column; accuracies as errors."),
        ],
        Settings.metric,
    ),
    "x": (
        Annotated[
            str,
            typer.Option(
                "--x", help="Column of the scale, train_flop in FLOP; two, A,B, for chinchilla and tied."
            ),
        ],
        Settings.x,
    ),
    "by": (
        Annotated[str, typer.Option("--by", "--group", help="Column whose values are fitted apart.")],
        Settings.by,
    ),
    "law": (
        Annotated[
            str,
            typer.Option(
                "--law",
                help="both (power and saturating), or one of: "
                + "; ".join(f"{name}, {law.formula}" for name, law in LAWS.items()),
            ),
        ],
        "both",
    ),
    "points": (
        Annotated[
            str,
            typer.Option(
                "--points", help="all, ends (last of each run), frontier, hull (its convex part) or bins."
            ),
        ],
        Settings.points,
    ),
    "min_samples": (
        Annotated[float, typer.Option("--min-samples", help="Leave out checkpoints that saw fewer samples.")],
        Settings.min_samples,
    ),
    "delta": (
        Annotated[
            float,
            typer.Option(
                "--huber",
                help="Corner of the Huber loss, in the unit of --residuals (0.03 of log is about 3 % of E).",
            ),
        ],
        DEFAULT_DELTA,
    ),
    "least_squares": (
        Annotated[
            bool, typer.Option("--least-squares", help="Least squares of the residuals instead of Huber.")
        ],
        False,
    ),
    "residuals": (
        Annotated[
            str,
            typer.Option("--residuals", help="log (of E), log1p (of 1 + E) or raw (E itself)."),
        ],
        Settings.residuals,
    ),
    "draws": (
        Annotated[int, typer.Option("--draws", help="Resamples of the runs for the intervals.")],
        Settings.draws,
    ),
    "seed": (Annotated[int, typer.Option("--seed", help="Seed of the resamples.")], Settings.seed),
    "batch": (
        Annotated[int | None, typer.Option("--batch", help="Keep runs of this global batch size.")],
        Settings.batch,
    ),
    "per_batch": (
        Annotated[bool, typer.Option("--per-batch", help="Fit every batch size apart.")],
        Settings.per_batch,
    ),
    "where": (
        Annotated[
            list[str] | None, typer.Option("--where", help="COLUMN=VALUE or COLUMN!=VALUE; repeatable.")
        ],
        None,
    ),
}


def settings_from(values: dict[str, Any]) -> Settings:
    """Settings from the values of the options. Raises UserError on an unknown law."""
    law = values.pop("law", "both")
    if law != "both" and law not in LAWS:
        raise UserError(f"--law {law} is unknown; use {', '.join(LAWS)} or both.")
    laws = BOTH if law == "both" else (law,)
    where = tuple(values.pop("where") or ())
    if values.pop("least_squares", False):
        values["delta"] = None
    return Settings(laws=laws, where=where, **values)


def with_settings(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared options but those left out; it receives them as one argument called settings."""
    names = [name for name in _OPTIONS if name not in left_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "settings"]
        common = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_OPTIONS[name][1], annotation=_OPTIONS[name][0]
            )
            for name in names
        ]

        def run(**values: Any) -> None:
            options = {name: values.pop(name) for name in names}
            command(settings=settings_from(options), **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        return run

    return decorate
