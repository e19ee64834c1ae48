"""Lightning under either name, `lightning.pytorch` or `pytorch_lightning`: two packages with classes of their own.

Installing the first brings the second, and a script imports them in any order around ours; so our classes are of both
where both work. The second import costs a fiftieth of the first.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
else:
    _PACKAGES = []
    for _name in ("lightning.pytorch", "pytorch_lightning"):
        # An old package fails so beside a newer torch or numpy; a script that uses it fails at its own import.
        with suppress(ImportError, AttributeError):
            _PACKAGES.append(import_module(_name))
    _PACKAGES = _PACKAGES or [import_module("lightning.pytorch")]  # raises what is wrong with it

    class Callback(*[package.Callback for package in _PACKAGES]):
        """A callback for trainers of both."""

    class LightningDataModule(*[package.LightningDataModule for package in _PACKAGES]):
        """A data module for trainers of both."""


__all__ = ["Callback", "LightningDataModule"]
