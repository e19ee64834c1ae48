"""Lightning under the name its user imported: `lightning.pytorch`, or `pytorch_lightning`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback, LightningDataModule
else:
    try:
        from lightning.pytorch import Callback, LightningDataModule
    except ModuleNotFoundError:
        from pytorch_lightning import Callback, LightningDataModule

__all__ = ["Callback", "LightningDataModule"]
