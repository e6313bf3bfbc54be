"""What is built once for a set of buckets: their groups."""

from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.group import Group


class Layout:
    """Buckets and groups that belong together. Dropped as a whole when the buckets change."""

    def __init__(self, buckets: list[Bucket], groups: list[Group]) -> None:
        self.buckets = buckets
        self.groups = groups
        self.full = False  # in a step of full precision
        self.groups_of: dict[int, list[Group]] = {id(b): [] for b in buckets}
        for group in groups:
            for bucket in group.buckets:
                self.groups_of[id(bucket)].append(group)
