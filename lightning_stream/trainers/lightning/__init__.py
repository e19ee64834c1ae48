"""Streamed data in PyTorch Lightning: the data module, and the callback that keeps the position."""
