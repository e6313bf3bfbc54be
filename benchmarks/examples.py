"""What benchmarks take of examples/, which is no package: its scripts import each other by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import flags
from tasks import TASKS, GPTModel, Task
from wire import tcp_bytes_sent

__all__ = ["TASKS", "GPTModel", "Task", "flags", "tcp_bytes_sent"]
