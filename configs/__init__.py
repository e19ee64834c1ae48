"""The configs of ``train.py``: in a wheel they are ``pkg://lightning_stream.configs``."""
