"""The orders of mosaicml-streaming 0.13, bit for bit, for training runs that continue or compare with that library.

Made from its documented behaviour and from experiments with its output. Its repeats, dropped batches and quirks are
kept, because they are what it delivers. `epoch` adapts an epoch to this package, `work` has the batching methods,
`samplings`, `shuffles` and `partitions` are the algorithms, and `state` reads that library's checkpoints.
"""
