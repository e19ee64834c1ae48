"""Lightning under either name, `lightning.pytorch` or `pytorch_lightning`: two packages with classes of their own.

Installing the first brings the second, and a script imports them in any order around ours; so our classes are of both
where both are there. The second import costs a fiftieth of the first.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
else:
    _FOUND = [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
    _PACKAGES = [
        import_module("lightning.pytorch" if name == "lightning" else name) for name in _FOUND or ["lightning"]
    ]

    class Callback(*[package.Callback for package in _PACKAGES]):
        """A callback for trainers of both."""

    class LightningDataModule(*[package.LightningDataModule for package in _PACKAGES]):
        """A data module for trainers of both."""


__all__ = ["Callback", "LightningDataModule"]
