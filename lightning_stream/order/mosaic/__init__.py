"""The orders of mosaicml-streaming 0.13, bit for bit, for training runs that continue or compare with that library.

Made from its documented behaviour and from experiments with its output. Its repeats, dropped batches and quirks are
kept, because they are what it delivers. `epoch` adapts an epoch to this package, `work` has the samplings and
batching methods, `shuffles` and `partitions` are the other algorithms, and `state` reads that library's checkpoints.
"""
