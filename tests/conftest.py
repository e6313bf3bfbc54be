"""What all tests share: one thread a process, since several processes run at a time; in CI hypothesis draws
the same examples in every run, so that what was green stays so."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
