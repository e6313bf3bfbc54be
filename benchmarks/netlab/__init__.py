"""The network lab: ranks on hosts of their own, with a link of limited bandwidth, on one machine.

`python -m benchmarks.netlab --help`. lab.py builds the network, stream.py measures what it carries, rank.py
is what runs on each host, hooks.py names what is compared, measure.py makes the table.
"""
