"""Stream training data from object storage into PyTorch trainers, exactly.

Public names are loaded on first use (PEP 562), so that importing the package pulls in neither torch, nor a
trainer, nor Spark, nor a cloud client.
"""

from __future__ import annotations

__version__ = "0.1.0"
