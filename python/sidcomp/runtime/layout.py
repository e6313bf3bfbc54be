"""A layout: what is built once for a set of buckets, namely their groups."""

from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.group import Group


class Layout:
    """Buckets, and the groups made for them. It is replaced as a whole when the buckets or the groups
    change."""

    def __init__(self, buckets: list[Bucket], groups: list[Group]) -> None:
        self.buckets = buckets
        self.groups = groups
        self.full = False  # whether the groups are set for a full-precision step
        self.groups_of: dict[int, list[Group]] = {id(b): [] for b in buckets}
        for group in groups:
            for bucket in group.buckets:
                self.groups_of[id(bucket)].append(group)
