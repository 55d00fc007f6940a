"""torchrun for a PyTorch that was built without libuv, as Debian's is.

Its own torchrun makes stores that need libuv, and ends before it starts a rank. USE_LIBUV=0, which it
advises, is read in some of the places only.
"""

import sys

import torch.distributed


class TCPStore(torch.distributed.TCPStore):

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"use_libuv": False, **kwargs})


# Before the launcher's modules import it by name.
torch.distributed.TCPStore = TCPStore

from torch.distributed import run  # noqa: E402

sys.exit(run.main())
