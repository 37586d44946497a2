"""The laws by name."""

from __future__ import annotations

from openclip_scaling.errors import UserError
from openclip_scaling.forms.broken import BrokenLaw
from openclip_scaling.forms.law import Law
from openclip_scaling.forms.power_laws import OffsetLaw, PowerLaw, SaturatingLaw
from openclip_scaling.forms.two_scales import ChinchillaLaw, TiedLaw

LAWS: dict[str, Law] = {
    law.name: law
    for law in (PowerLaw(), SaturatingLaw(), OffsetLaw(), BrokenLaw(), ChinchillaLaw(), TiedLaw())
}
# Whether there is a floor decides more verdicts than anything else, so these two are shown side by side.
BOTH = ("power", "saturating")


def law_named(name: str) -> Law:
    """The law of that name. Raises UserError on a foreign name."""
    if name not in LAWS:
        raise UserError(f"Unknown law {name!r}; known laws: {', '.join(LAWS)}.")
    return LAWS[name]
