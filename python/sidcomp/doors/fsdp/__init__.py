"""FSDP2 and HSDP: the collectives of `fully_shard`, compressed."""
