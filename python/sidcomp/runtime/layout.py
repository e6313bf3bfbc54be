"""A layout: what is built once for a set of buckets, namely their groups."""

from collections.abc import Sequence

from sidcomp.runtime.bucket import Bucket
from sidcomp.runtime.group import Group


class Layout:
    """Buckets, and the groups made for them. It is replaced as a whole when the buckets or the groups
    change. excluded: the parameters that rules send uncompressed."""

    def __init__(self, buckets: list[Bucket], groups: list[Group], excluded: set[str]) -> None:
        self.buckets = buckets
        self.groups = groups
        self.excluded = excluded
        self.full = False  # whether the groups are set for a full-precision step
        self.groups_of: dict[int, list[Group]] = {id(b): [] for b in buckets}
        for group in groups:
            for bucket in group.buckets:
                self.groups_of[id(bucket)].append(group)

    def completed_by(self, buckets: Sequence[Bucket]) -> list[Group]:
        """The groups that are complete when these buckets have come, in the order in which they become so."""
        here = set(map(id, buckets))
        at = {id(b): i for i, b in enumerate(buckets)}
        return [
            g
            for b in buckets
            for g in self.groups_of[id(b)]
            if all(id(x) in here for x in g.buckets) and max(g.buckets, key=lambda x: at[id(x)]) is b
        ]
