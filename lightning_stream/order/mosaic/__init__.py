"""The orders of mosaicml-streaming 0.13, bit for bit: materialised arrays, apart from the native order.

For training runs that continue or compare with one of that library. Made from its documented behaviour and from
experiments with its output; its repeats, dropped batches and quirks are kept, for they are what it delivers.

`epoch` adapts an epoch to the rest of this folder, `work` has its batching methods, `state` reads its checkpoints;
`samplings`, `shuffles` and `partitions` are its algorithms.
"""
