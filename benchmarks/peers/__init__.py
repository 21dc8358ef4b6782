"""Threefold beside its peers on the same work: ``python -m benchmarks.peers --help``.

Every system trains one plain decoder from the same initial weights on the same samples, on processes of one thread
each. A system is timed only if its first losses are those of a single process. All systems of a mode run in turn, round
after round, beside the bound of the mode: the same work when nobody has to talk.
"""
