"""What the first process of a run tells the others, before OpenCLIP has connected them."""

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, though not in __all__

WAIT = timedelta(minutes=5)
"""As long as the slowest process of a run may start after the first."""


def of_first_process(value: str) -> str:
    """The `value` of the process of rank 0, in every process of a torchrun; elsewhere that of the process itself.

    It is exchanged through the store that torchrun keeps for its processes, under a key of this restart; after an
    elastic change of members without a restart the earlier value may be given. Started otherwise (srun, mpirun),
    processes have no store before OpenCLIP makes one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or int(os.environ["WORLD_SIZE"]) < 2:
        return value
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=WAIT)
    key = f"openclip_linattn/first_process/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ["RANK"] == "0":
        store.set(key, value)
    return str(store.get(key).decode())
