"""The backend "sidcomp" of torch.distributed, which compresses what a program all-reduces.

import sidcomp.backend  # registers it

torch.distributed.init_process_group("cpu:sidcomp,cuda:sidcomp")
"""

from sidcomp.doors.backend.process_group import configure, process_group

__all__ = ["configure", "process_group"]
