"""Spark's daemon of Python workers, which has imported what they need before it forks them.

A worker whose task has failed ends, and to import pandas, pyarrow and this package takes its successor seconds.
"""

from importlib import import_module

from pyspark import daemon

for name in ("pandas", "pyarrow.dataset", "pyspark.worker", "pyspark.sql.pandas.serializers", "lightning_stream.spark"):
    import_module(name)

if __name__ == "__main__":
    daemon.manager()
