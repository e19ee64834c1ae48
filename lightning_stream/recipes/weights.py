"""Networks by name, and files of weights to start them from."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_stream.errors import FormatError, NotFoundError, missing_extra


def build_network(name: str, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A torchvision classification network with fresh weights.

    Raises:
        MissingExtraError: torchvision is not installed.
        ValueError: No network of that name; the message names the nearest.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise missing_extra("torchvision", "recipes", f"the network {name}") from error
    network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return network


def look_closely(network: nn.Module) -> None:
    """Let a ResNet begin with each pixel of a small picture, where it would begin with each fourth.

    Raises:
        ValueError: It is no ResNet.
    """
    first = getattr(network, "conv1", None)
    if not isinstance(first, nn.Conv2d) or not hasattr(network, "maxpool"):
        raise ValueError(f"small_images is for ResNets; {type(network).__name__} has no conv1 and maxpool.")
    network.conv1 = nn.Conv2d(first.in_channels, first.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Put a file's weights into a network, except for the last layer where its shape differs.

    Args:
        network: What takes them.
        path: A state dict, or a checkpoint of a classifier of this package, as ``torch.save`` wrote it.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It is not a file of weights, or not of this network.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise NotFoundError(f"model.weights must be a file of weights; there is none at {path.absolute()}.")
    own = network.state_dict()
    given = {name: value for name, value in _state(path).items() if not name.startswith(("mean", "std"))}
    head = _head_of(network)
    left_out = {name for name in given if name in own and given[name].shape != own[name].shape}
    wrong = sorted((own.keys() ^ given.keys()) | {name for name in left_out if not name.startswith(f"{head}.")})
    if wrong:
        raise FormatError(
            f"model.weights must fit model.network: {path} differs in {len(wrong)} tensors "
            f"({', '.join(wrong[:3])} ...). Pass weights of the same network."
        )
    network.load_state_dict({name: value for name, value in given.items() if name not in left_out}, strict=False)


def _head_of(network: nn.Module) -> str:
    """The name of the last linear layer."""
    linear: list[str] = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return linear[-1]


def _state(path: Path) -> dict[str, Tensor]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise FormatError(f"{path} must be a file of weights that loads with weights_only=True: {error}") from error
    if isinstance(held, Mapping) and isinstance(held.get("state_dict"), Mapping):
        held = held["state_dict"]
    if not isinstance(held, Mapping) or not all(isinstance(value, Tensor) for value in held.values()):
        raise FormatError(f"{path} must hold weights by name; found {type(held).__name__}.")
    return {str(name).removeprefix("network."): value for name, value in held.items()}
