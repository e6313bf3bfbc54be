"""Compression without torch.distributed: one rank, many ranks in one process, simulated networks."""
