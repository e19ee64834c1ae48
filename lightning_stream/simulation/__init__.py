"""What a training run will wait for: a node, its link to the store and its workers, on a simulated clock."""

from lightning_stream.simulation.result import Simulated
from lightning_stream.simulation.settings import CLOUDS, Link, Node, Prices, Work

__all__ = ["CLOUDS", "Link", "Node", "Prices", "Simulated", "Work"]
