"""Complete training runs on streamed shards, started by ``train.py``. They are imported from a checkout."""
